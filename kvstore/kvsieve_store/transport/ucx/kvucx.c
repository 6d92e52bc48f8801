/* A flat C interface to UCX (libucp 1.13 or later), for ctypes: one worker, one thread, events instead of callbacks.
 *
 * It moves bytes and keeps track of what UCX still holds; what may be read is decided in Python, between an event of
 * a request and the answer to it. Everything but kv_wake() belongs to the one thread that calls kv_run(). Whatever
 * may take long, progress first of all, happens inside kv_run() without the GIL.
 *
 * An operation is over, and its buffers are nobody's, when its EV_DONE has come: never before UCX has let go of them.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

enum { AM_REQUEST = 1, AM_REPLY = 2 };
enum { EV_DONE = 1, EV_REQUEST = 2, EV_FAILED = 3, EV_CLOSED = 4 };
enum { HEADER_BYTES = 32, TEXT_BYTES = 1024, MAX_WAITING = 1024, SPINS = 400, ROUNDS = 256 };

/* What Python sees. ptr, size: the request's header and body, or the refusal's text; good until the next kv_run().
 * id: of the operation; for EV_FAILED and EV_CLOSED the kv_ep. status: a ucs_status_t. refused: the reply's status. */
typedef struct {
    uint32_t type, refused;
    int32_t status;
    uint32_t pad;
    uint64_t id;
    const void *ptr;
    uint64_t size;
} kv_event;

typedef struct node {
    struct node *next;
    kv_event event;
    void *owned; /* freed once the event has been seen */
} node;

typedef struct kv kv;

typedef struct {
    kv *kv;
    ucp_ep_h ep;
    ucs_status_t status;
    int closing;
} kv_ep;

typedef struct op {
    struct op *next, *prev;
    kv *kv;
    kv_ep *ep;
    uint64_t id, total;
    ucs_status_t status;
    int refs;   /* UCX requests under way, and 1 for a reply that is awaited */
    int awaits; /* a reply */
    uint32_t refused;
    size_t n, text_size;
    ucp_dt_iov_t *iov;
    void *sent; /* header and body, for as long as UCX may read them */
    char text[TEXT_BYTES];
} op;

struct kv {
    ucp_context_h context;
    ucp_worker_h worker;
    int fd, waiting, seen_waiting;
    atomic_int wake;
    op ops; /* list head */
    node *first, **last, *seen;
    size_t max_request;
};

static void push(kv *k, kv_event event, void *owned) {
    node *n = malloc(sizeof *n);
    if (!n) abort(); /* an event that is lost would leave its buffers in use for ever */
    *n = (node){NULL, event, owned};
    *k->last = n;
    k->last = &n->next;
}

static op *new_op(kv *k, kv_ep *ep, uint64_t id, size_t n, const uint64_t *addresses, const uint64_t *lengths,
                  const void *header, const void *body, size_t size) {
    op *o = calloc(1, sizeof *o);
    if (!o) return NULL;
    o->iov = malloc((n + 1) * sizeof *o->iov);
    o->sent = malloc(HEADER_BYTES + size);
    if (!o->iov || !o->sent) {
        free(o->iov), free(o->sent), free(o);
        return NULL;
    }
    if (header) memcpy(o->sent, header, HEADER_BYTES);
    if (size) memcpy((char *)o->sent + HEADER_BYTES, body, size);
    for (size_t i = 0; i < n; i++) {
        o->iov[i] = (ucp_dt_iov_t){(void *)addresses[i], lengths[i]};
        o->total += lengths[i];
    }
    o->kv = k, o->ep = ep, o->id = id, o->n = n, o->refs = 1;
    o->next = k->ops.next, o->prev = &k->ops;
    o->next->prev = o->prev->next = o;
    return o;
}

static void release(op *o) {
    if (--o->refs) return;
    o->next->prev = o->prev, o->prev->next = o->next;
    free(o->iov), free(o->sent);
    push(o->kv, (kv_event){EV_DONE, o->refused, o->status, 0, o->id, o->text, o->text_size}, o);
}

static void note(op *o, ucs_status_t status) {
    if (status != UCS_OK && o->status == UCS_OK) o->status = status;
}

/* No reply will come any more. */
static void stop_awaiting(op *o, ucs_status_t status) {
    note(o, status);
    if (o->awaits) {
        o->awaits = 0;
        release(o);
    }
}

static void on_sent(void *request, ucs_status_t status, void *user) {
    op *o = user;
    ucp_request_free(request);
    if (status != UCS_OK) stop_awaiting(o, status);
    release(o);
}

static void on_received(void *request, ucs_status_t status, size_t length, void *user) {
    op *o = user;
    ucp_request_free(request);
    note(o, status);
    release(o);
}

/* Takes what a call of UCX returned; the operation has a reference for it. */
static void started(op *o, ucs_status_ptr_t request) {
    if (UCS_PTR_IS_ERR(request)) note(o, UCS_PTR_STATUS(request));
    if (!request || UCS_PTR_IS_ERR(request)) release(o);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static uint64_t word(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static ucs_status_t on_request(void *arg, const void *header, size_t header_size, void *data, size_t size,
                               const ucp_am_recv_param_t *param) {
    kv *k = arg;
    if (header_size != HEADER_BYTES || size > k->max_request || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) ||
        k->waiting >= MAX_WAITING)
        return UCS_OK; /* dropped: who asks like that has a deadline */
    char *copy = malloc(HEADER_BYTES + size);
    if (!copy) return UCS_OK;
    memcpy(copy, header, HEADER_BYTES);
    if (size) memcpy(copy + HEADER_BYTES, data, size);
    k->waiting++;
    push(k, (kv_event){EV_REQUEST, 0, UCS_OK, 0, 0, copy, HEADER_BYTES + size}, copy);
    return UCS_OK;
}

/* The header of a reply: u32 magic, u16 kind, u16 status, u64 id, u64 size. Ids are random: nobody else can answer. */
static ucs_status_t on_reply(void *arg, const void *header, size_t header_size, void *data, size_t size,
                             const ucp_am_recv_param_t *param) {
    kv *k = arg;
    op *o;
    if (header_size != HEADER_BYTES) return UCS_OK;
    for (o = k->ops.next; o != &k->ops && !(o->awaits && o->id == word((char *)header + 8)); o = o->next) {}
    if (o == &k->ops) return UCS_OK; /* late */
    int rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    uint16_t refused;
    memcpy(&refused, (char *)header + 6, sizeof refused);
    if (refused) {
        o->refused = refused;
        o->text_size = rendezvous || size > TEXT_BYTES ? 0 : size;
        memcpy(o->text, data, o->text_size);
    } else if (size != o->total || word((char *)header + 16) != size) {
        note(o, UCS_ERR_MESSAGE_TRUNCATED);
    } else if (rendezvous) {
        ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_DATATYPE,
                                 .cb.recv_am = on_received,
                                 .user_data = o,
                                 .datatype = o->n == 1 ? ucp_dt_make_contig(1) : ucp_dt_make_iov()};
        o->awaits = 0; /* its reference goes to the reception */
        started(o, ucp_am_recv_data_nbx(k->worker, data, o->n == 1 ? o->iov->buffer : (void *)o->iov,
                                        o->n == 1 ? o->total : o->n, &p));
        return UCS_INPROGRESS;
    } else {
        for (size_t i = 0, at = 0; i < o->n; at += o->iov[i++].length)
            memcpy(o->iov[i].buffer, (char *)data + at, o->iov[i].length);
    }
    stop_awaiting(o, UCS_OK);
    return UCS_OK;
}

static void on_failed(void *arg, ucp_ep_h ep, ucs_status_t status) {
    kv_ep *e = arg;
    e->status = status;
    push(e->kv, (kv_event){EV_FAILED, 0, status, 0, (uint64_t)e, NULL, 0}, NULL);
}

static void on_closed(void *request, ucs_status_t status, void *user) {
    kv_ep *e = user;
    if (request) ucp_request_free(request);
    for (op *o = e->kv->ops.next; o != &e->kv->ops; o = o->next)
        if (o->ep == e) o->ep = NULL;
    push(e->kv, (kv_event){EV_CLOSED, 0, UCS_OK, 0, (uint64_t)e, NULL, 0}, e);
}

static ucs_status_t set_handler(kv *k, unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t p = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                                              UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                .id = id,
                                .flags = UCP_AM_FLAG_WHOLE_MSG,
                                .cb = callback,
                                .arg = k};
    return ucp_worker_set_am_recv_handler(k->worker, &p);
}

const char *kv_status(int status) { return ucs_status_string(status); }

void kv_version(unsigned *numbers) { ucp_get_version(numbers, numbers + 1, numbers + 2); }

void kv_close(kv *k);

/* names, values: n settings of UCX, without the UCX_ before them. max_request: bytes of the longest request's body. */
kv *kv_open(const char **names, const char **values, int n, size_t max_request, int *status) {
    kv *k = calloc(1, sizeof *k);
    ucp_config_t *config;
    if (!k) return *status = UCS_ERR_NO_MEMORY, NULL;
    k->ops.next = k->ops.prev = &k->ops;
    k->last = &k->first;
    k->max_request = max_request;
    if ((*status = ucp_config_read(NULL, NULL, &config))) return free(k), NULL;
    for (int i = 0; i < n && !*status; i++) *status = ucp_config_modify(config, names[i], values[i]);
    ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                      .features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP};
    if (!*status) *status = ucp_init(&p, config, &k->context);
    ucp_config_release(config);
    if (*status) return free(k), NULL;
    ucp_worker_params_t w = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                             .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    if (!(*status = ucp_worker_create(k->context, &w, &k->worker)) &&
        !(*status = ucp_worker_get_efd(k->worker, &k->fd)) && !(*status = set_handler(k, AM_REQUEST, on_request)) &&
        !(*status = set_handler(k, AM_REPLY, on_reply)))
        return k;
    kv_close(k);
    return NULL;
}

static void forget(kv *k) {
    for (node *n; (n = k->seen);) {
        k->seen = n->next;
        free(n->owned), free(n);
    }
    k->waiting -= k->seen_waiting;
    k->seen_waiting = 0;
}

/* Ends everything, also what kv_disconnect() could not. */
void kv_close(kv *k) {
    if (k->worker) ucp_worker_destroy(k->worker);
    ucp_cleanup(k->context);
    forget(k);
    k->seen = k->first;
    k->first = NULL;
    forget(k);
    free(k);
}

/* From any thread: lets kv_run() return. */
void kv_wake(kv *k) {
    atomic_store(&k->wake, 1);
    ucp_worker_signal(k->worker);
}

/* Works until there are events, kv_wake() was called, or timeout_ms have passed (-1: for ever); sleeps while there is
 * nothing to do. Returns how many events it has written. */
int kv_run(kv *k, kv_event *events, int most, int timeout_ms) {
    int n = 0, idle = 0;
    double end = timeout_ms < 0 ? 0 : now() + timeout_ms * 1e-3;
    forget(k);
    for (unsigned rounds = 1; !k->first && !atomic_exchange(&k->wake, 0); rounds++) {
        if (end && rounds % ROUNDS == 0 && now() > end) break; /* busy, but with nothing to tell */
        if (ucp_worker_progress(k->worker)) {
            idle = 0;
            continue;
        }
        if (k->ops.next != &k->ops && ++idle < SPINS) continue; /* an answer may be about to come */
        ucs_status_t status = ucp_worker_arm(k->worker);
        if (status == UCS_ERR_BUSY) continue;
        if (status != UCS_OK || atomic_exchange(&k->wake, 0)) break;
        struct pollfd fd = {k->fd, POLLIN, 0};
        idle = 0;
        if (poll(&fd, 1, timeout_ms) <= 0) {
            ucp_worker_progress(k->worker);
            break;
        }
    }
    node **tail = &k->seen;
    for (; k->first && n < most; n++) {
        node *head = k->first;
        k->first = head->next;
        events[n] = head->event;
        k->seen_waiting += head->event.type == EV_REQUEST;
        head->next = NULL;
        *tail = head, tail = &head->next;
    }
    if (!k->first) k->last = &k->first;
    return n;
}

/* Copies the address of this worker to `out`; 0 when `room` is too small. */
size_t kv_address(kv *k, void *out, size_t room) {
    ucp_address_t *address;
    size_t size = 0;
    if (ucp_worker_get_address(k->worker, &address, &size)) return 0;
    if (size <= room) memcpy(out, address, size);
    ucp_worker_release_address(k->worker, address);
    return size <= room ? size : 0;
}

kv_ep *kv_connect(kv *k, const void *address, int *status) {
    kv_ep *e = calloc(1, sizeof *e);
    if (!e) return *status = UCS_ERR_NO_MEMORY, NULL;
    ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLER,
                         .address = address,
                         .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                         .err_handler = {.cb = on_failed, .arg = e}};
    e->kv = k;
    if (!(*status = ucp_ep_create(k->worker, &p, &e->ep))) return e;
    free(e);
    return NULL;
}

/* What UCX says of an endpoint, its lanes among it: text of at most `room` bytes, cut. Returns its length. */
size_t kv_describe(kv_ep *e, char *out, size_t room) {
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) return 0;
    ucp_ep_print_info(e->ep, file);
    fclose(file);
    if (size > room) size = room;
    memcpy(out, text, size);
    free(text);
    return size;
}

/* Ends an endpoint at once. Operations on it fail; EV_CLOSED follows, and then the kv_ep is gone. */
void kv_disconnect(kv_ep *e) {
    if (e->closing) return;
    e->closing = 1;
    for (op *o = e->kv->ops.next, *next; o != &e->kv->ops; o = next) {
        next = o->next;
        if (o->ep == e) stop_awaiting(o, UCS_ERR_CANCELED);
    }
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                             UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_EP_CLOSE_FLAG_FORCE,
                             .cb.send = on_closed,
                             .user_data = e};
    ucs_status_ptr_t request = ucp_ep_close_nbx(e->ep, &p);
    if (!request || UCS_PTR_IS_ERR(request)) on_closed(NULL, UCS_OK, e);
}

static int usable(const kv_ep *e) { return !e->closing && e->status == UCS_OK; }

/* Sends a request; the reply, as many bytes as the lengths have in all, goes to the addresses. EV_DONE follows,
 * unless an error is returned. */
int kv_ask(kv_ep *e, uint64_t id, const void *header, const void *body, size_t size, size_t n,
           const uint64_t *addresses, const uint64_t *lengths) {
    if (!usable(e)) return UCS_ERR_CANCELED;
    op *o = new_op(e->kv, e, id, n, addresses, lengths, header, body, size);
    if (!o) return UCS_ERR_NO_MEMORY;
    o->awaits = 1, o->refs = 2;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                             UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_AM_SEND_FLAG_EAGER,
                             .cb.send = on_sent,
                             .user_data = o};
    ucs_status_ptr_t request = ucp_am_send_nbx(e->ep, AM_REQUEST, o->sent, HEADER_BYTES,
                                               (char *)o->sent + HEADER_BYTES, size, &p);
    if (UCS_PTR_IS_ERR(request)) stop_awaiting(o, UCS_PTR_STATUS(request));
    started(o, request);
    return UCS_OK;
}

/* Sends a reply, gathered from the addresses. EV_DONE follows, unless an error is returned. */
int kv_answer(kv_ep *e, uint64_t id, const void *header, size_t n, const uint64_t *addresses, const uint64_t *lengths) {
    if (!usable(e)) return UCS_ERR_CANCELED;
    op *o = new_op(e->kv, e, id, n, addresses, lengths, header, NULL, 0);
    if (!o) return UCS_ERR_NO_MEMORY;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                             UCP_OP_ATTR_FIELD_DATATYPE,
                             .cb.send = on_sent,
                             .user_data = o,
                             .datatype = n > 1 ? ucp_dt_make_iov() : ucp_dt_make_contig(1)};
    void *data = n > 1 ? (void *)o->iov : n ? o->iov->buffer : NULL;
    started(o, ucp_am_send_nbx(e->ep, AM_REPLY, o->sent, HEADER_BYTES, data, n > 1 ? n : o->total, &p));
    return UCS_OK;
}

/* One-sided: n ranges of the peer's memory to the addresses. keys, registered: per range. EV_DONE follows once, unless
 * an error is returned. */
int kv_get(kv_ep *e, uint64_t id, size_t n, const uint64_t *addresses, const uint64_t *lengths, const uint64_t *remote,
           const ucp_rkey_h *keys, const ucp_mem_h *registered) {
    if (!usable(e)) return UCS_ERR_CANCELED;
    op *o = new_op(e->kv, e, id, n, addresses, lengths, NULL, NULL, 0);
    if (!o) return UCS_ERR_NO_MEMORY;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                             UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND,
                             .cb.send = on_sent,
                             .user_data = o};
    for (size_t i = 0; i < n && o->status == UCS_OK; i++) {
        o->refs++;
        p.memh = registered[i];
        started(o, ucp_get_nbx(e->ep, (void *)addresses[i], lengths[i], remote[i], keys[i], &p));
    }
    release(o);
    return UCS_OK;
}

ucp_mem_h kv_map(kv *k, void *address, size_t size, int *status) {
    ucp_mem_h handle;
    ucp_mem_map_params_t p = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                              .address = address,
                              .length = size};
    return (*status = ucp_mem_map(k->context, &p, &handle)) ? NULL : handle;
}

void kv_unmap(kv *k, ucp_mem_h handle) { ucp_mem_unmap(k->context, handle); }

/* Copies the remote key of registered memory to `out`; 0 when `room` is too small. */
size_t kv_pack_key(kv *k, ucp_mem_h handle, void *out, size_t room) {
    void *key;
    size_t size = 0;
    if (ucp_rkey_pack(k->context, handle, &key, &size)) return 0;
    if (size <= room) memcpy(out, key, size);
    ucp_rkey_buffer_release(key);
    return size <= room ? size : 0;
}

ucp_rkey_h kv_unpack_key(kv_ep *e, const void *key, int *status) {
    ucp_rkey_h handle;
    if (!usable(e)) return *status = UCS_ERR_CANCELED, NULL;
    return (*status = ucp_ep_rkey_unpack(e->ep, key, &handle)) ? NULL : handle;
}

void kv_drop_key(ucp_rkey_h handle) { ucp_rkey_destroy(handle); }
