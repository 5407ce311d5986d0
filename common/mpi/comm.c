// The transport for many processes: Open MPI starts them and carries messages between machines.
#include "clock.h"
#include "device.h"
#include "error.h"
#include "trace.h"
#include "transport.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct comm_config comm_mpi_config = {.timeout_s = 300}; // until the flags are known

static struct {
    struct comm_group *world;
    struct comm_group *groups; // all, linked by next
    char *facts; // "name<TAB>value<NEWLINE>" …
    size_t facts_length;
    int local_size;
    bool started; // comm_start() is over
    bool finished;
} job;

const char *comm_transport(void) {
    return "mpi";
}

struct comm comm_self(void) {
    return (struct comm){
        .rank = 0,
        .size = 1,
    };
}

int comm_local_size(void) {
    return job.local_size;
}

// ---- errors ------------------------------------------------------------------------------------

// Ends all ranks, with their exit code. Open MPI's mpirun does so when a rank leaves without
// MPI_Finalize, with fewer words than MPI_Abort makes of it; other launchers need to be told.
static void abort_all(int code) {
    if (getenv("OMPI_COMM_WORLD_RANK") == NULL) {
        alarm(5); // should MPI hang
        MPI_Abort(MPI_COMM_WORLD, code);
    }
    _exit(code);
}

static void abort_fatal(void) {
    abort_all(1);
}

// MPI_Allreduce with the time limit. Sleeps in between: the start may be slow, but needs no core.
static void min_of_all(const int *mine, int *least, int count) {
    MPI_Request request;
    int done = 0;
    double begin_s = clock_s();
    MPI_Iallreduce(mine, least, count, MPI_INT, MPI_MIN, MPI_COMM_WORLD, &request);
    for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done;
         MPI_Test(&request, &done, MPI_STATUS_IGNORE)) {
        if (time_left_s(begin_s) < 0) {
            if (job.world->rank > 0) {
                leave_it_to_others();
            }
            error_fatal(
                __FILE__, __LINE__,
                "not all ranks have come to the start after %g s (--comm-timeout); some are "
                "stopped, or busy",
                comm_mpi_config.timeout_s);
        }
        usleep(200);
    }
}

// Returns if no rank has an error. `text` is this rank's, or NULL. A rank that only wants to leave,
// for --help, agrees with those that do as well.
static void agree(const char *text, bool leaves) {
    int size = job.world->size, rank = job.world->rank;
    int mine[3] = {text != NULL ? rank : size, leaves ? rank : size, leaves};
    int least[3];
    char help[200];
    min_of_all(mine, least, 3);
    int first = least[0];
    if (first == size && (least[1] == size || least[2])) {
        return;
    }
    if (first == size) {
        first = least[1];
        snprintf(
            help, sizeof help,
            "%s: --help is given to rank %d, but not to all ranks; give it to all or to none\n",
            program_invocation_short_name, first);
        text = help;
    }
    if (first == rank) {
        fputs(text, stderr);
        fflush(stderr);
    }
    MPI_Barrier(MPI_COMM_WORLD); // mpirun ends the job at the first exit, so let the text out
    job.finished = true;
    MPI_Finalize();
    fflush(NULL);
    _exit(2);
}

static void user_error(const char *text) {
    if (!job.started) {
        agree(text, false);
    }
    fputs(text, stderr);
    abort_all(2);
}

// Somebody called exit(): for --help, on all ranks; else one rank leaves the others alone.
static void finish_at_exit(int code, void *unused) {
    (void)unused;
    if (job.finished) {
        return;
    }
    if (job.started || code != 0) {
        error_warning("rank %d left by exit(%d) in the middle; with it end all ranks",
                      job.world->rank, code);
        abort_all(code != 0 ? code : 1);
    }
    agree(NULL, true);
    job.finished = true;
    MPI_Finalize();
}

// ---- groups ------------------------------------------------------------------------------------

static struct comm comm_of(struct comm_group *g) {
    return (struct comm){
        .rank = g->rank,
        .size = g->size,
        .group = g,
    };
}

// The numbers in the job of a group's ranks.
static int *job_ranks(MPI_Comm mpi, int size) {
    MPI_Group all, some;
    int *ranks = calloc((size_t)size, sizeof *ranks);
    int *numbers = calloc((size_t)size, sizeof *numbers);
    CHECK(ranks != NULL && numbers != NULL);
    for (int r = 0; r < size; r++) {
        numbers[r] = r;
    }
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Comm_group(mpi, &some);
    MPI_Group_translate_ranks(some, size, numbers, all, ranks);
    MPI_Group_free(&all);
    MPI_Group_free(&some);
    free(numbers);
    return ranks;
}

static struct comm_group *group_new(MPI_Comm mpi, const char *name) {
    struct comm_group *g = calloc(1, sizeof *g);
    CHECK(g != NULL);
    snprintf(g->name, sizeof g->name, "%s", name);
    g->mpi = mpi;
    MPI_Comm_rank(mpi, &g->rank);
    MPI_Comm_size(mpi, &g->size);
    g->job_ranks = job_ranks(mpi, g->size);
    g->next = job.groups;
    job.groups = g;
    return g;
}

// How many ranks of the group run on this machine.
static int local_size(MPI_Comm mpi) {
    MPI_Comm local;
    int size = 0;
    MPI_Comm_split_type(mpi, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    MPI_Comm_size(local, &size);
    MPI_Comm_free(&local);
    return size;
}

// Shared memory, if all ranks of the group can have it and want it.
static void group_share(struct comm_group *g) {
    int wanted = g->size > 1 && !comm_mpi_config.messages && local_size(g->mpi) == g->size;
    int all = 0;
    MPI_Allreduce(&wanted, &all, 1, MPI_INT, MPI_MIN, g->mpi);
    g->shared = all ? shared_open(g) : NULL;
}

static void group_free(struct comm_group *g) {
    if (g->shared != NULL) {
        shared_close(g->shared);
    }
    MPI_Comm_free(&g->mpi);
    free(g->job_ranks);
    free(g);
}

struct comm comm_split(struct comm c, int color, const char *name) {
    CHECK(job.started && color >= 0);
    MPI_Comm mpi;
    comm_barrier(c); // with the time limit that MPI's call has not
    stream_acquire();
    MPI_Comm_split(c.group->mpi, color, c.rank, &mpi);
    struct comm_group *g = group_new(mpi, name);
    group_share(g);
    stream_release();
    return comm_of(g);
}

// ---- start and end -----------------------------------------------------------------------------

struct comm comm_init(void) {
    int level = MPI_THREAD_SINGLE;
    MPI_Comm mpi;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    on_exit(finish_at_exit, NULL);
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    job.world = group_new(mpi, "world");
    job.local_size = local_size(mpi);
    error_set_hooks((struct error_hooks){
        .rank = job.world->rank,
        .user = user_error,
        .abort = abort_fatal,
    });
    comm_must_match("the program", program_invocation_short_name);
    if (level < MPI_THREAD_SERIALIZED) {
        error_user("this MPI library allows only one thread (level %d); shard.c needs level %d, "
                   "MPI_THREAD_SERIALIZED: use Open MPI as Debian builds it",
                   level, MPI_THREAD_SERIALIZED);
    }
    return comm_of(job.world);
}

void comm_must_match(const char *name, const char *value) {
    size_t more = strlen(name) + strlen(value) + 2;
    job.facts = realloc(job.facts, job.facts_length + more + 1);
    CHECK(job.facts != NULL);
    snprintf(job.facts + job.facts_length, more + 1, "%s\t%s\n", name, value);
    job.facts_length += more;
}

// Compares this rank's facts with rank 0's, line by line.
static void facts_compare(const char *theirs) {
    const char *mine = job.facts;
    while (*mine != '\0' || *theirs != '\0') {
        int my_length = (int)strcspn(mine, "\n");
        int their_length = (int)strcspn(theirs, "\n");
        if (my_length == their_length && memcmp(mine, theirs, (size_t)my_length) == 0) {
            mine += my_length + 1;
            theirs += their_length + 1;
            continue;
        }
        int name = (int)strcspn(mine, "\t\n");
        int their_name = (int)strcspn(theirs, "\t\n");
        if (name == their_name && memcmp(mine, theirs, (size_t)name) == 0) {
            error_user("%.*s is %.*s on rank %d, but %.*s on rank 0; it must be the same on all "
                       "ranks",
                       name, mine, my_length - name - 1, mine + name + 1, job.world->rank,
                       their_length - name - 1, theirs + name + 1);
        }
        error_user("rank %d runs another program than rank 0 (it knows \"%.*s\", rank 0 \"%.*s\"); "
                   "start the same program on all ranks",
                   job.world->rank, name, mine, their_name, theirs);
    }
}

static void facts_agree(void) {
    unsigned long long length = job.facts_length;
    MPI_Bcast(&length, 1, MPI_UNSIGNED_LONG_LONG, 0, MPI_COMM_WORLD);
    char *theirs = calloc(1, length + 1);
    CHECK(theirs != NULL && length < INT32_MAX);
    if (job.world->rank == 0) {
        memcpy(theirs, job.facts, length);
    }
    MPI_Bcast(theirs, (int)length, MPI_BYTE, 0, MPI_COMM_WORLD);
    facts_compare(theirs);
    agree(NULL, false);
    free(theirs);
    free(job.facts);
    job.facts = NULL;
}

void comm_start(struct comm c, const struct comm_config *config) {
    CHECK(c.group == job.world && !job.started);
    comm_mpi_config = *config;
    agree(NULL, false);
    facts_agree();
    if (config->log != NULL) {
        log_calls_open(config->log, c.rank);
    }
    agree(NULL, false);
    group_share(job.world);
    stream_start();
    job.started = true;
}

bool comm_finish(void) {
    if (job.started) {
        comm_barrier(comm_of(job.world)); // nobody waits for ever in MPI_Finalize
        stream_stop();
    }
    bool logged = log_calls_close();
    if (!logged) {
        error_warning("rank %d: the log of --log-comm is not complete", job.world->rank);
    }
    while (job.groups != NULL) {
        struct comm_group *g = job.groups;
        job.groups = g->next;
        group_free(g);
    }
    job.finished = true;
    MPI_Finalize();
    return logged;
}

// ---- accounts ----------------------------------------------------------------------------------

// Bytes that a ring sends per rank.
static uint64_t ring_bytes(const struct call *call) {
    uint64_t n = (uint64_t)call->group->size;
    uint64_t element = dtype_size(call->dtype);
    bool last = call->group->rank == (call->peer + call->group->size - 1) % call->group->size;
    switch (call->account) {
    case COMM_ALL_REDUCE:
        return 2 * (n - 1) * ((call->count + n - 1) / n) * element;
    case COMM_REDUCE_SCATTER:
    case COMM_ALL_GATHER:
        return (n - 1) * call->count * element;
    case COMM_BROADCAST:
        return last ? 0 : call->count * element;
    case COMM_SEND:
        return call->count * element;
    default:
        return 0;
    }
}

struct comm_stats comm_group_stats(struct comm c) {
    return c.group != NULL ? c.group->stats : (struct comm_stats){0};
}

struct comm_stats comm_stats(void) {
    struct comm_stats sum = {0};
    for (const struct comm_group *g = job.groups; g != NULL; g = g->next) {
        for (int k = 0; k < COMM_KINDS; k++) {
            sum.calls[k] += g->stats.calls[k];
            sum.bytes[k] += g->stats.bytes[k];
        }
    }
    return sum;
}

// ---- collectives on tensors --------------------------------------------------------------------

// Counts, logs and enqueues a call.
static struct comm_handle enqueue(struct comm c, struct call call, bool wake) {
    CHECK(job.started);
    call.group = c.group;
    bool point = call.kind == COMM_SEND || call.kind == COMM_RECV; // not on all ranks
    call.number = point ? ++c.group->points : ++c.group->calls;
    call.enqueued_us = trace_on() ? trace_now_us() : 0;
    c.group->stats.calls[call.account]++;
    c.group->stats.bytes[call.account] += ring_bytes(&call);
    log_call(&call);
    return (struct comm_handle){.ticket = stream_push(&call, wake)};
}

static char *host_view(struct tensor t) {
    char *data = device_host_view(t);
    CHECK(data != NULL || tensor_count(t) == 0);
    return data;
}

// A group of one rank that no transport knows needs no call.
static bool alone(struct comm c) {
    return c.size == 1;
}

struct comm_handle comm_all_reduce(struct comm c, struct tensor x, enum comm_op op) {
    if (alone(c)) {
        return (struct comm_handle){0};
    }
    struct call call = {
        .kind = COMM_ALL_REDUCE,
        .account = COMM_ALL_REDUCE,
        .whole = host_view(x),
        .count = tensor_count(x),
        .dtype = x.dtype,
        .op = op,
    };
    return enqueue(c, call, true);
}

// A part and a whole of c.size parts.
static struct comm_handle parts(struct comm c, enum comm_kind kind, struct tensor part,
                                struct tensor whole) {
    CHECK(tensor_count(whole) == (size_t)c.size * tensor_count(part));
    CHECK(part.dtype == whole.dtype);
    if (alone(c)) {
        bool gather = kind == COMM_ALL_GATHER;
        struct tensor to = gather ? whole : part;
        struct tensor from = gather ? part : whole;
        if (to.data != from.data) {
            memcpy(host_view(to), host_view(from), tensor_count(to) * dtype_size(to.dtype));
        }
        return (struct comm_handle){0};
    }
    struct call call = {
        .kind = kind,
        .account = kind,
        .whole = host_view(whole),
        .part = host_view(part),
        .count = tensor_count(part),
        .dtype = part.dtype,
        .op = COMM_SUM,
    };
    return enqueue(c, call, true);
}

struct comm_handle comm_reduce_scatter(struct comm c, struct tensor part, struct tensor whole) {
    return parts(c, COMM_REDUCE_SCATTER, part, whole);
}

struct comm_handle comm_all_gather(struct comm c, struct tensor whole, struct tensor part) {
    return parts(c, COMM_ALL_GATHER, part, whole);
}

static struct comm_handle with_peer(struct comm c, enum comm_kind kind, struct tensor x, int peer) {
    CHECK(peer >= 0 && peer < c.size);
    if (alone(c)) {
        CHECK(kind == COMM_BROADCAST);
        return (struct comm_handle){0};
    }
    struct call call = {
        .kind = kind,
        .account = kind,
        .whole = host_view(x),
        .count = tensor_count(x),
        .dtype = x.dtype,
        .peer = peer,
    };
    return enqueue(c, call, true);
}

struct comm_handle comm_broadcast(struct comm c, struct tensor x, int root) {
    return with_peer(c, COMM_BROADCAST, x, root);
}

struct comm_handle comm_send(struct comm c, struct tensor x, int to) {
    return with_peer(c, COMM_SEND, x, to);
}

struct comm_handle comm_recv(struct comm c, struct tensor x, int from) {
    return with_peer(c, COMM_RECV, x, from);
}

void comm_wait(struct comm_handle handle) {
    if (handle.ticket > 0) {
        stream_wait(handle.ticket);
    }
}

// ---- collectives on host memory ----------------------------------------------------------------

void comm_gather_host(struct comm c, void *all, const void *data, size_t bytes) {
    if (alone(c)) {
        memcpy(all, data, bytes);
        return;
    }
    struct call call = {
        .kind = COMM_ALL_GATHER,
        .account = COMM_HOST,
        .whole = all,
        .part = (char *)data, // only read
        .count = bytes,
        .dtype = DTYPE_U8,
    };
    comm_wait(enqueue(c, call, false));
}

void comm_broadcast_host(struct comm c, void *data, size_t bytes, int root) {
    CHECK(root >= 0 && root < c.size);
    if (alone(c)) {
        return;
    }
    struct call call = {
        .kind = COMM_BROADCAST,
        .account = COMM_HOST,
        .whole = data,
        .count = bytes,
        .dtype = DTYPE_U8,
        .peer = root,
    };
    comm_wait(enqueue(c, call, false));
}

static void point_host(struct comm c, enum comm_kind kind, void *data, size_t bytes, int peer) {
    CHECK(peer >= 0 && peer < c.size && peer != c.rank);
    struct call call = {
        .kind = kind,
        .account = COMM_HOST,
        .whole = data,
        .count = bytes,
        .dtype = DTYPE_U8,
        .peer = peer,
    };
    comm_wait(enqueue(c, call, false));
}

void comm_send_host(struct comm c, const void *data, size_t bytes, int to) {
    point_host(c, COMM_SEND, (void *)data, bytes, to); // only read
}

void comm_recv_host(struct comm c, void *data, size_t bytes, int from) {
    point_host(c, COMM_RECV, data, bytes, from);
}

void comm_barrier(struct comm c) {
    char all[c.size];
    comm_gather_host(c, all, "", 1);
}

// The values of all ranks, (c.size * bytes); the caller frees them.
static void *gathered(struct comm c, const void *x, size_t bytes) {
    void *all = malloc((size_t)c.size * bytes + 1);
    CHECK(all != NULL);
    comm_gather_host(c, all, x, bytes);
    return all;
}

void comm_sum_f64(struct comm c, double *x, size_t count) {
    double *all = gathered(c, x, count * sizeof *x);
    for (size_t i = 0; i < count; i++) {
        x[i] = all[i];
        for (size_t r = 1; r < (size_t)c.size; r++) {
            x[i] += all[r * count + i];
        }
    }
    free(all);
}

void comm_max_u32(struct comm c, uint32_t *x) {
    uint32_t *all = gathered(c, x, sizeof *x);
    for (int r = 0; r < c.size; r++) {
        *x = all[r] > *x ? all[r] : *x;
    }
    free(all);
}

void comm_sum_u128(struct comm c, unsigned __int128 *x) {
    unsigned __int128 *all = gathered(c, x, sizeof *x);
    *x = all[0];
    for (int r = 1; r < c.size; r++) {
        *x += all[r];
    }
    free(all);
}
