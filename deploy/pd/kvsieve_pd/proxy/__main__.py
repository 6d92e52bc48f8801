from kvsieve_pd.proxy.command import main

main()
