// Collectives through MPI's messages: between machines, or where ranks cannot share memory.
//
// Every rank sends each other rank its part directly. That is as many bytes as around a ring,
// 2(n-1)/n of the buffer for an all-reduce, and lets every rank add its part in rank order.
#include "clock.h"
#include "error.h"
#include "transport.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    TAG_CHECK = 1,
    TAG_COLLECTIVE,
    TAG_POINT,
    POLLS_BEFORE_SLEEP = 200,
};

// ---- requests ----------------------------------------------------------------------------------

// Messages under way; room for one to and one from each rank.
struct requests {
    const struct call *call;
    MPI_Request *list; // (2 * size)
    int *peer; // (2 * size) the rank at the other end
    int count;
};

static struct requests requests_new(const struct call *call) {
    size_t n = (size_t)call->group->size;
    struct requests q = {
        .call = call,
        .list = calloc(2 * n, sizeof *q.list),
        .peer = calloc(2 * n, sizeof *q.peer),
    };
    CHECK(q.list != NULL && q.peer != NULL);
    return q;
}

static void requests_free(struct requests *q) {
    free(q->list);
    free(q->peer);
}

static void post_send(struct requests *q, const void *data, size_t bytes, int to, int tag) {
    if (bytes > 0) {
        q->peer[q->count] = to;
        MPI_Isend(data, (int)bytes, MPI_BYTE, to, tag, q->call->group->mpi, &q->list[q->count++]);
    }
}

static void post_recv(struct requests *q, void *data, size_t bytes, int from, int tag) {
    if (bytes > 0) {
        q->peer[q->count] = from;
        MPI_Irecv(data, (int)bytes, MPI_BYTE, from, tag, q->call->group->mpi, &q->list[q->count++]);
    }
}

// Who has sent nothing, or taken nothing, has not entered the call, or is stuck.
static void late(const struct requests *q) {
    bool *entered = malloc((size_t)q->call->group->size * sizeof *entered);
    CHECK(entered != NULL);
    for (int r = 0; r < q->call->group->size; r++) {
        entered[r] = true;
    }
    for (int i = 0; i < q->count; i++) {
        if (q->list[i] != MPI_REQUEST_NULL) {
            entered[q->peer[i]] = false;
        }
    }
    report_late(q->call, entered);
}

static void poll_pause(int polls) {
    if (polls < POLLS_BEFORE_SLEEP) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

// Waits for all of them, and forgets them.
static void wait_all(struct requests *q) {
    double begin_s = clock_s();
    for (int polls = 0, done = 0; !done; polls++) {
        if (polls > 0) {
            poll_pause(polls);
        }
        for (int i = 0; i < q->count; i++) { // one by one, so that we know which are over
            MPI_Test(&q->list[i], &done, MPI_STATUS_IGNORE);
        }
        done = 1;
        for (int i = 0; i < q->count; i++) {
            done = done && q->list[i] == MPI_REQUEST_NULL;
        }
        if (!done && time_left_s(begin_s) < 0) {
            late(q);
        }
    }
    q->count = 0;
}

// ---- the collectives ---------------------------------------------------------------------------

// Where the parts of the ranks lie in the whole: part r begins at element begin[r]; n + 1 of them.
static void cut(size_t *begin, size_t count, int n, bool equal) {
    for (size_t r = 0; r <= (size_t)n; r++) {
        begin[r] = equal ? count * r : count / (size_t)n * r + count % (size_t)n * r / (size_t)n;
    }
}

static size_t longest(const size_t *begin, int n) {
    size_t most = 0;
    for (int r = 0; r < n; r++) {
        size_t length = begin[r + 1] - begin[r];
        most = length > most ? length : most;
    }
    return most;
}

// The length of the piece of part r that begins `at` elements behind the part's begin.
static size_t piece(const size_t *begin, int r, size_t at, size_t most) {
    size_t length = begin[r + 1] - begin[r];
    size_t left = at < length ? length - at : 0;
    return left < most ? left : most;
}

// Every rank gets its part of all ranks' wholes and puts the reduction of them at `sum`.
static void exchange_and_reduce(const struct call *call, const size_t *begin, char *sum) {
    int n = call->group->size;
    int rank = call->group->rank;
    size_t element = dtype_size(call->dtype);
    size_t most = MESSAGE_BYTES / element / (size_t)n;
    size_t end = longest(begin, n);
    char *stage = malloc((size_t)n * most * element);
    struct requests q = requests_new(call);
    const void *sources[n];
    CHECK(stage != NULL);
    for (size_t at = 0; at < end; at += most) {
        size_t mine = piece(begin, rank, at, most);
        for (int r = 0; r < n; r++) {
            char *part = call->whole + (begin[r] + at) * element;
            sources[r] = r == rank ? part : stage + (size_t)r * most * element;
            if (r != rank) {
                post_recv(&q, stage + (size_t)r * most * element, mine * element, r,
                          TAG_COLLECTIVE);
                post_send(&q, part, piece(begin, r, at, most) * element, r, TAG_COLLECTIVE);
            }
        }
        wait_all(&q);
        reduce_in_order(sum + at * element, sources, n, mine, call->dtype, call->op);
    }
    requests_free(&q);
    free(stage);
}

// Every rank sends its part to all others.
static void exchange_parts(const struct call *call, const size_t *begin, const char *mine) {
    int n = call->group->size;
    int rank = call->group->rank;
    size_t element = dtype_size(call->dtype);
    size_t most = MESSAGE_BYTES / element;
    size_t end = longest(begin, n);
    struct requests q = requests_new(call);
    for (size_t at = 0; at < end; at += most) {
        for (int r = 0; r < n; r++) {
            if (r != rank) {
                post_recv(&q, call->whole + (begin[r] + at) * element,
                          piece(begin, r, at, most) * element, r, TAG_COLLECTIVE);
                post_send(&q, mine + at * element, piece(begin, rank, at, most) * element, r,
                          TAG_COLLECTIVE);
            }
        }
        wait_all(&q);
    }
    requests_free(&q);
}

static void all_reduce(const struct call *call) {
    int n = call->group->size;
    size_t begin[n + 1];
    cut(begin, call->count, n, false);
    char *mine = call->whole + begin[call->group->rank] * dtype_size(call->dtype);
    exchange_and_reduce(call, begin, mine);
    exchange_parts(call, begin, mine);
}

static void reduce_scatter(const struct call *call) {
    size_t begin[call->group->size + 1];
    cut(begin, call->count, call->group->size, true);
    exchange_and_reduce(call, begin, call->part);
}

static void all_gather(const struct call *call) {
    size_t begin[call->group->size + 1];
    size_t bytes = call->count * dtype_size(call->dtype);
    cut(begin, call->count, call->group->size, true);
    char *mine = call->whole + (size_t)call->group->rank * bytes;
    exchange_parts(call, begin, call->part);
    if (mine != call->part) {
        memcpy(mine, call->part, bytes);
    }
}

static void broadcast(const struct call *call) {
    size_t bytes = call->count * dtype_size(call->dtype);
    struct requests q = requests_new(call);
    for (size_t at = 0; at < bytes; at += MESSAGE_BYTES) {
        size_t length = bytes - at < MESSAGE_BYTES ? bytes - at : MESSAGE_BYTES;
        for (int r = 0; r < call->group->size && call->group->rank == call->peer; r++) {
            if (r != call->peer) {
                post_send(&q, call->whole + at, length, r, TAG_COLLECTIVE);
            }
        }
        if (call->group->rank != call->peer) {
            post_recv(&q, call->whole + at, length, call->peer, TAG_COLLECTIVE);
        }
        wait_all(&q);
    }
    requests_free(&q);
}

// All ranks look at the signatures of all.
static void check(const struct call *call) {
    int n = call->group->size;
    int rank = call->group->rank;
    struct signature signatures[n];
    struct requests q = requests_new(call);
    signatures[rank] = signature_of(call);
    for (int r = 0; r < n; r++) {
        if (r != rank) {
            post_recv(&q, &signatures[r], sizeof signatures[r], r, TAG_CHECK);
            post_send(&q, &signatures[rank], sizeof signatures[rank], r, TAG_CHECK);
        }
    }
    wait_all(&q);
    requests_free(&q);
    signatures_compare(call->group, signatures);
}

void messages_run(const struct call *call) {
    if (comm_mpi_config.check && call->group->size > 1) {
        check(call);
    }
    switch (call->kind) {
    case COMM_ALL_REDUCE:
        all_reduce(call);
        break;
    case COMM_REDUCE_SCATTER:
        reduce_scatter(call);
        break;
    case COMM_ALL_GATHER:
        all_gather(call);
        break;
    case COMM_BROADCAST:
        broadcast(call);
        break;
    default:
        error_fatal(__FILE__, __LINE__, "%s is no collective", comm_kind_name(call->kind));
    }
}

// ---- send and receive --------------------------------------------------------------------------

// A send or receive under way: one MPI request for each piece. With --check-comm the sender's
// signature goes first, and the receiver asks for the pieces when it has looked at it.
struct point {
    uint64_t ticket;
    struct call call;
    MPI_Request checked; // the signature under way
    struct signature signature; // the sender's
    bool posted; // the pieces are under way
    MPI_Request *pieces; // (count)
    MPI_Status *statuses; // (count)
    size_t count;
    double begin_s;
    struct point *next;
};

static struct point *points; // in the order of their begin
static size_t point_count;

static void point_post(struct point *p, int tag) {
    const struct call *call = &p->call;
    size_t bytes = call->count * dtype_size(call->dtype);
    for (size_t i = 0; i < p->count; i++) {
        size_t at = i * MESSAGE_BYTES;
        int length = (int)(bytes - at < MESSAGE_BYTES ? bytes - at : MESSAGE_BYTES);
        if (call->kind == COMM_SEND) {
            MPI_Isend(call->whole + at, length, MPI_BYTE, call->peer, tag, call->group->mpi,
                      &p->pieces[i]);
        } else {
            MPI_Irecv(call->whole + at, length, MPI_BYTE, call->peer, tag, call->group->mpi,
                      &p->pieces[i]);
        }
    }
    p->posted = true;
}

// The pieces behind a signature have a tag of their own, so that receives find theirs in any order.
static int point_tag(const struct signature *s) {
    return TAG_POINT + 1 + (int)(s->number % 16384);
}

void messages_begin(const struct call *call, uint64_t ticket) {
    struct point *p = calloc(1, sizeof *p);
    CHECK(p != NULL);
    *p = (struct point){
        .ticket = ticket,
        .call = *call,
        .checked = MPI_REQUEST_NULL,
        .signature = signature_of(call),
        .count = call->count * dtype_size(call->dtype) / MESSAGE_BYTES + 1, // at least one
        .begin_s = clock_s(),
    };
    p->pieces = calloc(p->count, sizeof *p->pieces);
    p->statuses = calloc(p->count, sizeof *p->statuses);
    CHECK(p->pieces != NULL && p->statuses != NULL);
    if (!comm_mpi_config.check) {
        point_post(p, TAG_POINT);
    } else if (call->kind == COMM_SEND) {
        MPI_Isend(&p->signature, sizeof p->signature, MPI_BYTE, call->peer, TAG_POINT,
                  call->group->mpi, &p->checked);
        point_post(p, point_tag(&p->signature));
    } else {
        MPI_Irecv(&p->signature, sizeof p->signature, MPI_BYTE, call->peer, TAG_POINT,
                  call->group->mpi, &p->checked);
    }
    struct point **link = &points;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = p;
    point_count++;
}

size_t messages_pending(void) {
    return point_count;
}

// A receive must find what it expects: MPI itself complains only of too much.
static void point_check_length(const struct point *p) {
    size_t found = 0;
    for (size_t i = 0; i < p->count; i++) {
        int length = 0;
        MPI_Get_count(&p->statuses[i], MPI_BYTE, &length);
        found += (size_t)length;
    }
    size_t expected = p->call.count * dtype_size(p->call.dtype);
    if (p->call.kind == COMM_RECV && found != expected) {
        error_fatal(__FILE__, __LINE__,
                    "recv from rank %d (call %llu of group %s): found %zu bytes, expected %zu",
                    p->call.group->job_ranks[p->call.peer], (unsigned long long)p->call.number,
                    p->call.group->name, found, expected);
    }
}

static bool point_done(struct point *p) {
    int done = 0;
    MPI_Test(&p->checked, &done, MPI_STATUS_IGNORE);
    if (done && !p->posted) {
        point_compare(&p->call, &p->signature);
        point_post(p, point_tag(&p->signature));
    }
    if (done) {
        MPI_Testall((int)p->count, p->pieces, &done, p->statuses);
    }
    if (!done && time_left_s(p->begin_s) < 0) {
        report_late(&p->call, NULL);
    }
    return done;
}

void messages_progress(void (*done)(uint64_t ticket, const struct call *call)) {
    struct point **link = &points;
    while (*link != NULL) {
        struct point *p = *link;
        if (!point_done(p)) {
            link = &p->next;
            continue;
        }
        *link = p->next;
        point_count--;
        point_check_length(p);
        done(p->ticket, &p->call);
        free(p->statuses);
        free(p->pieces);
        free(p);
    }
}
