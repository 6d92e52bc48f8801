"""A proxy that lets one engine prefill and another decode: `python -m kvsieve_pd.proxy`.

settings.py   what it is started with
instances.py  the engines, who is alive, who is next
upstream.py   one request to one engine
params.py     what either engine is asked, out of what the client asked
flows.py      prefill first or beside decode; retries
app.py        HTTP: paths, limits, answers
errors.py     what clients get when something fails
metrics.py    what Prometheus sees
"""
