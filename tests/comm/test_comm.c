// Collectives between ranks: every result is compared, bit by bit, with what each rank works out by
// itself from known values (values.h).
//
//     mpirun -n 4 test_comm [--messages] [--check] [--only WORD]
//
// All ranks run the same cases. A case that fails says on which rank, in which call, and which
// element is wrong; then the exit code is 1. With --mismatch, --fault, --user-error or --fact the
// job must end by itself instead (misuse.h); tests/comm/failures.sh looks at how.
#include "args.h"
#include "device.h"
#include "error.h"
#include "jobs.h"
#include "misuse.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    COUNT_ALL = 300, // every number of elements up to here
    WINDOW = 24, // numbers of elements in flight at once
    WHOLE_MOST = 1 << 22, // elements of a whole that is made of parts
};

// Where code cuts its buffers into pieces: at powers of two, of elements or bytes.
static const size_t LARGE[] = {
    511,   512,   513,   1023,   4095,   4096,   4097,   16383,   16385,
    65535, 65536, 65537, 262143, 262144, 262145, 524289, 1 << 20, (1 << 20) + 7,
};
static size_t large = LENGTH(LARGE); // how many of them are tried

static const enum dtype REDUCED[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F64, DTYPE_I32};
static const enum dtype COPIED[] = {DTYPE_F32, DTYPE_BF16, DTYPE_U8, DTYPE_F64};

// ---- ranks that may not read each other's memory -----------------------------------------------

static bool reading_forbidden;

// Takes the place of the C library's: with --no-reading it refuses, as the kernel does in many
// containers. Then the transport must do without.
ssize_t process_vm_readv(pid_t pid, const struct iovec *here, unsigned long here_count,
                         const struct iovec *there, unsigned long there_count,
                         unsigned long flags) {
    if (reading_forbidden) {
        errno = EPERM;
        return -1;
    }
    return syscall(SYS_process_vm_readv, pid, here, here_count, there, there_count, flags);
}

// ---- every number of elements ------------------------------------------------------------------

// Adds the jobs of one case for one type and number of elements; the same on all ranks of the
// group. `number` counts the calls of the function.
typedef void add_jobs(const struct group *g, enum dtype dtype, size_t count, size_t number);

// Every number of elements, WINDOW of them in flight.
static void sweep(const struct group *g, add_jobs *jobs, const enum dtype *dtypes, size_t types) {
    size_t number = 0;
    for (size_t d = 0; d < types; d++) {
        for (size_t count = 0; count <= COUNT_ALL; count++) {
            jobs(g, dtypes[d], count, number++);
            if (count % WINDOW == WINDOW - 1 || count == COUNT_ALL) {
                jobs_run();
            }
        }
        for (size_t i = 0; i < large; i++) {
            jobs(g, dtypes[d], LARGE[i], number++);
            if (i % 3 == 2 || i == large - 1) {
                jobs_run();
            }
        }
    }
}

// ---- cases: one kind of call -------------------------------------------------------------------

static void add_sum(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    job_add(g, COMM_ALL_REDUCE, dtype, count, number);
}

static void add_max(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    job_add(g, COMM_ALL_REDUCE, dtype, count, number)->op = COMM_MAX;
}

static void add_reduce_scatter(const struct group *g, enum dtype dtype, size_t count,
                               size_t number) {
    if (count * (size_t)g->c.size > WHOLE_MOST) {
        return;
    }
    job_add(g, COMM_REDUCE_SCATTER, dtype, count, number);
    job_add(g, COMM_REDUCE_SCATTER, dtype, count, number + 1)->in_place = true;
}

static void add_all_gather(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    if (count * (size_t)g->c.size > WHOLE_MOST) {
        return;
    }
    job_add(g, COMM_ALL_GATHER, dtype, count, number);
    job_add(g, COMM_ALL_GATHER, dtype, count, number + 1)->in_place = true;
}

static void add_broadcast(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    int roots = count <= COUNT_ALL && count % WINDOW == 0 ? g->c.size : 1;
    for (int root = 0; root < roots; root++) {
        struct job *job = job_add(g, COMM_BROADCAST, dtype, count, number * 3 + (size_t)root);
        job->peer = ((int)(number % 1000) + root) % g->c.size;
    }
}

static void test_all_reduce_sum(void) {
    sweep(&test.world, add_sum, REDUCED, LENGTH(REDUCED));
}

static void test_all_reduce_max(void) {
    sweep(&test.world, add_max, REDUCED, LENGTH(REDUCED));
}

static void test_reduce_scatter(void) {
    sweep(&test.world, add_reduce_scatter, REDUCED, LENGTH(REDUCED));
}

static void test_all_gather(void) {
    sweep(&test.world, add_all_gather, COPIED, LENGTH(COPIED));
}

static void test_broadcast(void) {
    sweep(&test.world, add_broadcast, COPIED, LENGTH(COPIED));
}

// The values are such that a sum in another order shows; else the cases above prove little.
static void test_order_shows(void) {
    int n = test.world.c.size;
    for (size_t d = 0; d < LENGTH(REDUCED) && n > 2; d++) {
        struct values parts[RANKS_MAX];
        for (int m = 0; m < n; m++) {
            parts[m] = *member_values(&test.world, m, REDUCED[d]);
        }
        size_t places = values_order_shows(parts, n);
        if (REDUCED[d] != DTYPE_I32 && places < VALUES / 10) {
            fault("%s: the reverse order of %d ranks shows in %zu of %d places",
                  dtype_name(REDUCED[d]), n, places, VALUES);
        }
    }
}

// ---- cases: send and receive -------------------------------------------------------------------

static void add_message(const struct group *g, enum comm_kind kind, enum dtype dtype, size_t count,
                        int peer, size_t shift) {
    struct job *job = job_add(g, kind, dtype, count, 0);
    job->peer = peer;
    job->shift = shift;
}

// To the next rank, from the one before.
static void add_ring(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    int n = g->c.size, next = (g->c.rank + 1) % n, before = (g->c.rank + n - 1) % n;
    if (n == 1) {
        return;
    }
    add_message(g, number % 2 == 0 ? COMM_SEND : COMM_RECV, dtype, count,
                number % 2 == 0 ? next : before, number * 5);
    add_message(g, number % 2 == 0 ? COMM_RECV : COMM_SEND, dtype, count,
                number % 2 == 0 ? before : next, number * 5);
}

static void test_ring(void) {
    sweep(&test.world, add_ring, COPIED, LENGTH(COPIED));
}

enum { TO_ONE_PEER = 4 }; // messages in flight

// Each rank to each other one, both directions at once, several messages that differ in their
// values and some also in their sizes. Everybody sends first, or everybody receives first.
static void add_pairs(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    int n = g->c.size, me = g->c.rank;
    for (int phase = 0; phase < 2; phase++) {
        bool sends = (phase + number) % 2 == 0;
        for (int distance = 1; distance < n; distance++) {
            int peer = (me + (sends ? distance : n - distance)) % n;
            int receiver = sends ? peer : me;
            for (size_t k = 0; k < TO_ONE_PEER; k++) {
                size_t shift = number * 101 + (size_t)receiver * 31 + k * 7;
                add_message(g, sends ? COMM_SEND : COMM_RECV, dtype, count + k % 2, peer, shift);
            }
        }
    }
}

static void test_pairs(void) {
    static const size_t counts[] = {0, 1, 2, 17, 300, 1000, 4096, 16385, 65537, 1 << 18};
    for (size_t d = 0; d < LENGTH(COPIED); d++) {
        for (size_t i = 0; i < LENGTH(counts); i++) {
            if (counts[i] <= 4096 || large > 0) {
                add_pairs(&test.world, COPIED[d], counts[i], i + d);
                jobs_run();
            }
        }
    }
}

// A receive whose message is not there yet, and a send that nobody takes yet, hold up nothing.
static void test_no_hold_up(void) {
    const struct group *g = &test.world;
    int n = g->c.size, next = (g->c.rank + 1) % n, before = (g->c.rank + n - 1) % n;
    static const size_t counts[] = {1, 1000, 1 << 16, (1 << 20) + 7};
    for (size_t i = 0; i < LENGTH(counts) && n > 1; i++) {
        enum comm_kind first = i % 2 == 0 ? COMM_RECV : COMM_SEND;
        enum comm_kind second = i % 2 == 0 ? COMM_SEND : COMM_RECV;
        struct job jobs[3];
        add_message(g, first, DTYPE_F32, counts[i], first == COMM_SEND ? next : before, i);
        job_add(g, COMM_ALL_REDUCE, DTYPE_F32, 5000, i);
        add_message(g, second, DTYPE_F32, counts[i], second == COMM_SEND ? next : before, i);
        memcpy(jobs, test.jobs, sizeof jobs);
        test.job_count = 0;
        job_start(&jobs[0]);
        job_start(&jobs[1]);
        comm_wait(jobs[1].handle);
        job_check(&jobs[1]);
        job_start(&jobs[2]);
        comm_wait(jobs[2].handle);
        comm_wait(jobs[0].handle);
        job_check(&jobs[0]);
        job_check(&jobs[2]);
    }
}

// ---- cases: host memory ------------------------------------------------------------------------

static const double *f64_of(const struct values *values) {
    return values->data;
}

// The sum over the group's ranks of what each of them makes of its rank in the job.
static unsigned __int128 sum_u128(const struct group *g, unsigned __int128 (*f)(int rank)) {
    unsigned __int128 sum = 0;
    for (int m = 0; m < g->c.size; m++) {
        sum += f(g->members[m]);
    }
    return sum;
}

static unsigned __int128 small_u128(int rank) {
    return (unsigned)rank + 1;
}

static unsigned __int128 carry_u128(int rank) { // the lower half overflows
    return ((unsigned __int128)(unsigned)(rank * 7 + 1) << 64 | UINT64_MAX) - (unsigned)rank;
}

static unsigned __int128 wide_u128(int rank) { // 16 of them fit
    return (((unsigned __int128)1 << 124) - 1) / (unsigned)(rank + 1);
}

static void check_sum_f64(const struct group *g, size_t count) {
    double *x = malloc((count + 1) * sizeof *x);
    CHECK(x != NULL);
    const double *mine = f64_of(member_values(g, g->c.rank, DTYPE_F64));
    const struct values *sum = &g->sum[DTYPE_F64];
    for (size_t i = 0; i < count; i++) {
        x[i] = mine[(i + count) % VALUES];
    }
    x[count] = 4711;
    comm_sum_f64(g->c, x, count);
    for (size_t i = 0; i < count; i++) {
        const double *expected = f64_of(sum) + (i + count) % VALUES;
        if (!values_equal(sum, &x[i], expected)) {
            fault("comm_sum_f64, group %s, %zu elements: element %zu: found %a, expected %a",
                  g->name, count, i, x[i], *expected);
            break;
        }
    }
    if (x[count] != 4711) {
        fault("comm_sum_f64, %zu elements: wrote beyond the end", count);
    }
    free(x);
}

static void check_single_values(const struct group *g) {
    static unsigned __int128 (*const functions[])(int) = {small_u128, carry_u128, wide_u128};
    for (size_t i = 0; i < LENGTH(functions); i++) {
        unsigned __int128 x = functions[i](g->members[g->c.rank]);
        unsigned __int128 expected = sum_u128(g, functions[i]);
        comm_sum_u128(g->c, &x);
        if (x != expected) {
            fault("comm_sum_u128, group %s: found %llx %016llx, expected %llx %016llx", g->name,
                  (unsigned long long)(x >> 64), (unsigned long long)x,
                  (unsigned long long)(expected >> 64), (unsigned long long)expected);
        }
    }
    for (int largest = 0; largest < g->c.size; largest++) {
        uint32_t expected = largest % 2 == 0 ? UINT32_MAX : 0x7f800000; // 32 bits, not 31
        uint32_t x = g->c.rank == largest ? expected : (uint32_t)g->c.rank;
        comm_max_u32(g->c, &x);
        if (x != expected) {
            fault("comm_max_u32, group %s, largest on rank %d: found %x, expected %x", g->name,
                  largest, (unsigned)x, (unsigned)expected);
        }
    }
    uint32_t zero = 0;
    comm_max_u32(g->c, &zero);
    if (zero != 0) {
        fault("comm_max_u32 of zeros, group %s: found %x", g->name, (unsigned)zero);
    }
}

static unsigned char byte_of(int rank, size_t i) {
    return (unsigned char)((size_t)(rank + 1) * 41 + i * 7 + i / 256);
}

static void check_broadcast_host(const struct group *g, size_t bytes, int root) {
    unsigned char *x = malloc(bytes + 1);
    CHECK(x != NULL);
    for (size_t i = 0; i <= bytes; i++) {
        x[i] = byte_of(g->members[g->c.rank], i);
    }
    comm_broadcast_host(g->c, x, bytes, root);
    for (size_t i = 0; i <= bytes; i++) {
        unsigned char expected = byte_of(g->members[i < bytes ? root : g->c.rank], i);
        if (x[i] != expected) {
            fault("comm_broadcast_host, group %s, root %d, %zu bytes: byte %zu: found %d, "
                  "expected %d",
                  g->name, root, bytes, i, x[i], expected);
            break;
        }
    }
    free(x);
}

static void check_gather_host(const struct group *g, size_t bytes) {
    size_t n = (size_t)g->c.size;
    unsigned char *all = malloc(n * bytes + 1), *data = calloc(bytes + 1, 1);
    CHECK(all != NULL && data != NULL);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = byte_of(g->members[g->c.rank], i);
    }
    memset(all, 0xff, n * bytes + 1);
    comm_gather_host(g->c, all, data, bytes);
    for (size_t i = 0; i < n * bytes; i++) {
        unsigned char expected = byte_of(g->members[i / bytes], i % bytes);
        if (all[i] != expected) {
            fault("comm_gather_host, group %s, %zu bytes: byte %zu: found %d, expected %d", g->name,
                  bytes, i, all[i], expected);
            break;
        }
    }
    if (all[n * bytes] != 0xff) {
        fault("comm_gather_host, %zu bytes: wrote beyond the end", bytes);
    }
    free(data);
    free(all);
}

static void host_calls(const struct group *g, size_t step) {
    for (size_t count = 0; count <= COUNT_ALL; count += step) {
        check_sum_f64(g, count);
        check_broadcast_host(g, count, (int)(count % (size_t)g->c.size));
        check_gather_host(g, count);
    }
    check_single_values(g);
    for (int root = 0; root < g->c.size; root++) {
        check_broadcast_host(g, 8, root);
    }
}

static void test_host(void) {
    host_calls(&test.world, 1);
    for (size_t i = 0; i < large; i++) {
        check_sum_f64(&test.world, LARGE[i]);
        check_broadcast_host(&test.world, LARGE[i] * 3, (int)(i % (size_t)test.world.c.size));
        check_gather_host(&test.world, LARGE[i]);
    }
}

// Host calls between calls that are still in flight.
static void test_host_between(void) {
    for (size_t i = 0; i < 20; i++) {
        add_sum(&test.world, DTYPE_F32, 30000 + i, i);
        add_all_gather(&test.world, DTYPE_F32, 1000 + i, i);
        for (size_t j = 0; j < test.job_count; j++) {
            job_start(&test.jobs[j]);
        }
        host_calls(&test.world, 100);
        jobs_finish();
    }
}

// Nobody leaves before everybody has come; the ranks run on one machine, so on one clock.
static void test_barrier(void) {
    int n = test.world.c.size;
    for (int late = 0; late < n; late++) {
        double times[2] = {0, 0}, all[RANKS_MAX][2];
        if (test.world.c.rank == late) {
            usleep(20000);
        }
        times[0] = seconds();
        comm_barrier(test.world.c);
        times[1] = seconds();
        comm_gather_host(test.world.c, all, times, sizeof times);
        for (int r = 0; r < n; r++) {
            if (all[r][1] < all[late][0]) {
                fault("rank %d left the barrier %.6f s before rank %d came", r,
                      all[late][0] - all[r][1], late);
            }
        }
    }
}

// ---- cases: groups -----------------------------------------------------------------------------

static void add_mixture(const struct group *g, enum dtype dtype, size_t count, size_t number) {
    add_sum(g, dtype, count, number);
    add_all_gather(g, dtype, count, number);
    add_broadcast(g, dtype, count, number);
    add_reduce_scatter(g, dtype, count, number);
    add_ring(g, dtype, count, number);
    add_max(g, dtype, count, number);
}

static void group_calls(const struct group *g) {
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 255, 1001, 4097, 65537};
    for (size_t i = 0; i < LENGTH(counts); i++) {
        add_mixture(g, i % 2 == 0 ? DTYPE_F32 : DTYPE_BF16, counts[i], i);
        if (i % 3 == 2) {
            jobs_run();
        }
    }
    jobs_run();
    host_calls(g, 60);
    comm_barrier(g->c);
}

// The ways to cut the ranks that are tried: the color of a rank.
static int color_of(int way, int rank) {
    switch (way) {
    case 0: // all together
        return 5;
    case 1: // each alone
        return rank;
    case 2: // not neighbours
        return rank % 2;
    case 3: // neighbours
        return rank / 3;
    case 4: // one, and the rest
        return rank == 0 ? 1000000 : 3;
    default: // of uneven sizes: 1, 2, 3, … ranks
        return rank < 1 ? 2 : rank < 3 ? 1 : 0;
    }
}

enum { WAYS = 6 };

static struct group cut(const struct group *parent, int way, const char *name) {
    int colors[RANKS_MAX];
    for (int m = 0; m < parent->c.size; m++) {
        colors[m] = color_of(way, m);
    }
    return group_split(parent, colors, name);
}

static void test_split(void) {
    for (int way = 0; way < WAYS; way++) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "way%d", way);
        struct group g = cut(&test.world, way, name);
        group_calls(&g);
        struct group inner = cut(&g, (way + 2) % WAYS, "inner");
        group_calls(&inner);
        group_close(&inner);
        group_close(&g);
    }
}

// Calls of several groups to which a rank belongs, in flight together.
static void test_interleaved(void) {
    struct group groups[] = {
        test.world,
        cut(&test.world, 2, "dp"),
        cut(&test.world, 3, "tp"),
        cut(&test.world, 1, "alone"),
    };
    for (size_t round = 0; round < 12; round++) {
        for (size_t i = 0; i < LENGTH(groups) * 3; i++) {
            const struct group *g = &groups[(i + round) % LENGTH(groups)];
            add_mixture(g, DTYPE_F32, round * 500 + i, i + round);
        }
        jobs_run();
    }
    for (size_t i = 1; i < LENGTH(groups); i++) {
        group_close(&groups[i]);
    }
}

// The group of one rank is there without a collective.
static void test_self(void) {
    struct group g = {
        .c = comm_self(),
        .name = "self",
        .members = {test.world.c.rank},
    };
    group_values(&g);
    if (g.c.rank != 0 || g.c.size != 1) {
        fault("comm_self(): found rank %d of %d, expected 0 of 1", g.c.rank, g.c.size);
    } else {
        group_calls(&g);
    }
    group_close(&g);
}

// ---- cases: the stream -------------------------------------------------------------------------

// As many calls in flight as a large model's buckets, and more.
static void test_many_in_flight(void) {
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 150; i++) {
            add_mixture(&test.world, REDUCED[i % LENGTH(REDUCED)], i * 3, i);
            if (test.job_count > JOBS_MAX - 32) {
                break;
            }
        }
        jobs_run();
    }
}

// Ranks that come at different times: now one is late, now another.
static void test_paces(void) {
    for (size_t i = 0; i < 60; i++) {
        add_mixture(&test.world, DTYPE_F32, i * 37, i);
        for (size_t j = 0; j < test.job_count; j++) {
            size_t chance = (i * 31 + j * 17 + (size_t)test.world.c.rank * 11) % 23;
            if (chance < 2) {
                usleep((useconds_t)(200 + 300 * chance));
            }
            job_start(&test.jobs[j]);
        }
        jobs_finish();
    }
}

// Waiting twice, and for nothing.
static void test_wait(void) {
    comm_wait((struct comm_handle){0});
    add_sum(&test.world, DTYPE_F32, 100, 0);
    add_sum(&test.world, DTYPE_F32, 100000, 1);
    for (size_t j = 0; j < test.job_count; j++) {
        job_start(&test.jobs[j]);
    }
    comm_wait(test.jobs[1].handle);
    comm_wait(test.jobs[0].handle);
    comm_wait(test.jobs[1].handle);
    for (size_t j = 0; j < test.job_count; j++) {
        job_check(&test.jobs[j]);
    }
    test.job_count = 0;
}

// ---- cases: accounts ---------------------------------------------------------------------------

// What the ring algorithm sends, worked out as comm.h says.
static uint64_t ring_bytes(const struct job *job) {
    uint64_t n = (uint64_t)job->group->c.size, size = dtype_size(job->dtype), count = job->count;
    switch (job->kind) {
    case COMM_ALL_REDUCE:
        return 2 * (n - 1) * ((count + n - 1) / n) * size;
    case COMM_REDUCE_SCATTER:
    case COMM_ALL_GATHER:
        return (n - 1) * count * size;
    case COMM_BROADCAST: // the last one of the chain that starts at the root passes nothing on
        return job->group->c.rank == (job->peer + (int)n - 1) % (int)n ? 0 : count * size;
    case COMM_SEND:
        return count * size;
    default:
        return 0;
    }
}

static void check_account(const struct group *g, const char *whose, const struct comm_stats *before,
                          const struct comm_stats *after, const struct comm_stats *expected) {
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        uint64_t calls = after->calls[kind] - before->calls[kind];
        uint64_t bytes = after->bytes[kind] - before->bytes[kind];
        bool bytes_known = kind != COMM_HOST;
        if (calls != expected->calls[kind] || (bytes_known && bytes != expected->bytes[kind])) {
            fault("account of %s, group %s of %d ranks, %s: found %llu calls and %llu bytes, "
                  "expected %llu and %llu",
                  whose, g->name, g->c.size, comm_kind_name((enum comm_kind)kind),
                  (unsigned long long)calls, (unsigned long long)bytes,
                  (unsigned long long)expected->calls[kind],
                  (unsigned long long)expected->bytes[kind]);
        }
    }
}

// Some calls, with the account before and after. A group of one rank sends nothing, and whether its
// calls count is nobody's concern.
static void count_calls(const struct group *g, add_jobs *jobs, size_t count) {
    struct comm_stats group = comm_group_stats(g->c), all = comm_stats(), expected = {0};
    for (size_t d = 0; d < LENGTH(REDUCED); d++) {
        jobs(g, REDUCED[d], count, d);
    }
    for (size_t i = 0; i < test.job_count; i++) {
        expected.calls[test.jobs[i].kind]++;
        expected.bytes[test.jobs[i].kind] += ring_bytes(&test.jobs[i]);
    }
    jobs_run();
    check_single_values(g);
    expected.calls[COMM_HOST] = 3 + (uint64_t)g->c.size + 1;
    struct comm_stats group_now = comm_group_stats(g->c), all_now = comm_stats();
    for (int kind = 0; kind < COMM_KINDS && g->c.size == 1; kind++) {
        expected.calls[kind] = group_now.calls[kind] - group.calls[kind];
    }
    check_account(g, "the group", &group, &group_now, &expected);
    check_account(g, "all groups", &all, &all_now, &expected);
}

static void test_accounts(void) {
    struct group groups[] = {test.world, cut(&test.world, 4, "uneven")};
    static const size_t counts[] = {0, 1, 2, 3, 100, 1021, 65537};
    for (size_t i = 0; i < LENGTH(groups); i++) {
        for (size_t j = 0; j < LENGTH(counts); j++) {
            count_calls(&groups[i], add_mixture, counts[j]);
        }
    }
    group_close(&groups[1]);
    static const char *const names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast",
                                        "send",       "recv",           "host"};
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        if (strcmp(comm_kind_name((enum comm_kind)kind), names[kind]) != 0) {
            fault("comm_kind_name(%d): found \"%s\", expected \"%s\"", kind,
                  comm_kind_name((enum comm_kind)kind), names[kind]);
        }
    }
    if (comm_local_size() != test.world.c.size) { // of mpirun on one machine
        fault("comm_local_size(): found %d, expected %d", comm_local_size(), test.world.c.size);
    }
}

// ---- overlap: reported, not judged -------------------------------------------------------------

// Something to do meanwhile, about as long as a step's computation between two buckets.
static double compute(int rounds) {
    volatile double start = 1; // so that the compiler leaves the work where it is
    double x = start;
    for (int i = 0; i < rounds * 100000; i++) {
        x = x * 0.999999 + 1e-6;
    }
    return x;
}

// The all-reduce alone, the computation alone, both; and how long is left to wait after a pause in
// which the main thread does nothing. Where ranks are more than half of the cores, "both" cannot be
// much less than the sum.
static void test_overlap(void) {
    enum { COUNT = 4 << 20, ROUNDS = 60, PAUSE_US = 100000, REPEATS = 5 };
    struct tensor x = tensor_alloc(1, COUNT, DTYPE_F32, MEM_COMM);
    values_fill(x, member_values(&test.world, test.world.c.rank, DTYPE_F32), 0);
    double best[4] = {1e9, 1e9, 1e9, 1e9}, sink = 0;
    for (int i = 0; i < REPEATS * 4; i++) {
        struct comm_handle handle = {0};
        int what = i % 4;
        comm_barrier(test.world.c);
        double start = seconds();
        if (what != 1) {
            handle = comm_all_reduce(test.world.c, x, COMM_MAX);
        }
        if (what == 1 || what == 2) {
            sink += compute(ROUNDS);
        } else if (what == 3) {
            usleep(PAUSE_US);
            start = seconds();
        }
        comm_wait(handle);
        double took = seconds() - start;
        best[what] = took < best[what] ? took : best[what];
    }
    if (test.world.c.rank == 0 && sink > 0) {
        printf("     16 MiB all-reduce %.1f ms, computation %.1f ms, both at once %.1f ms;\n"
               "     %.1f ms are left after a pause of %d ms\n",
               best[0] * 1e3, best[1] * 1e3, best[2] * 1e3, best[3] * 1e3, PAUSE_US / 1000);
    }
    tensor_free(&x);
}

// ---- beyond 2^31 elements ----------------------------------------------------------------------

static size_t available_bytes(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[256];
    size_t kib = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) {
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib * 1024;
}

static void big(enum comm_kind kind, enum dtype dtype, size_t count, bool in_place) {
    const struct comm c = test.world.c;
    size_t whole = count * (kind == COMM_ALL_GATHER ? (size_t)c.size : 1);
    size_t buffers = kind == COMM_ALL_REDUCE ? 2 : 1; // transports may need as much again
    size_t bytes = whole * dtype_size(dtype) * (size_t)c.size * buffers + ((size_t)1 << 30);
    uint32_t poor = available_bytes() < bytes;
    comm_max_u32(c, &poor);
    if (c.rank == 0) {
        printf("     %s of %zu %s%s\n", comm_kind_name(kind), count, dtype_name(dtype),
               poor ? ": skipped, not enough memory" : "");
        fflush(stdout);
    }
    if (poor || (kind == COMM_SEND && c.size < 2)) {
        return;
    }
    int peer = c.size - 1;
    if (kind == COMM_SEND) {
        kind = c.rank == peer ? COMM_SEND : COMM_RECV;
        peer = c.rank == peer ? 0 : peer;
    }
    if (kind != COMM_RECV || c.rank == 0) {
        struct job *job = job_add(&test.world, kind, dtype, count, 1);
        job->peer = peer;
        job->in_place = in_place;
        job->shift = 1; // of send and receive alike
    }
    jobs_run();
}

static void test_big(void) {
    const size_t edge = (size_t)1 << 31;
    big(COMM_BROADCAST, DTYPE_U8, edge + 13, false);
    big(COMM_SEND, DTYPE_U8, edge + 5, false);
    big(COMM_ALL_GATHER, DTYPE_U8, edge / (size_t)test.world.c.size + 3, true);
    big(COMM_ALL_GATHER, DTYPE_U8, edge + 3, true);
    big(COMM_ALL_REDUCE, DTYPE_BF16, edge + 7, false);
}

// ---- all cases ---------------------------------------------------------------------------------

static const struct test_case {
    const char *name;
    void (*run)(void);
} CASES[] = {
    {"order-shows", test_order_shows},
    {"all-reduce-sum", test_all_reduce_sum},
    {"all-reduce-max", test_all_reduce_max},
    {"reduce-scatter", test_reduce_scatter},
    {"all-gather", test_all_gather},
    {"broadcast", test_broadcast},
    {"ring", test_ring},
    {"pairs", test_pairs},
    {"no-hold-up", test_no_hold_up},
    {"host", test_host},
    {"host-between", test_host_between},
    {"barrier", test_barrier},
    {"split", test_split},
    {"interleaved", test_interleaved},
    {"self", test_self},
    {"many-in-flight", test_many_in_flight},
    {"paces", test_paces},
    {"wait", test_wait},
    {"accounts", test_accounts},
    {"overlap", test_overlap},
    {"big", test_big},
};

// Results that should be the same everywhere must be so in the bits that nobody prescribes, too:
// those of NaN.
static void compare_hashes(void) {
    uint64_t all[RANKS_MAX];
    comm_gather_host(test.world.c, all, &test.hash, sizeof test.hash);
    for (int r = 1; r < test.world.c.size; r++) {
        if (all[r] != all[0]) {
            fault("the results have other bits on rank %d than on rank 0", r);
            break;
        }
    }
}

static void run_case(const struct test_case *c) {
    double start = seconds();
    test.name = c->name;
    test.case_faults = 0;
    test.hash = 0;
    c->run();
    compare_hashes();
    uint32_t failed = test.case_faults > 0;
    comm_max_u32(test.world.c, &failed);
    if (test.world.c.rank == 0) {
        printf("%s %s (%.0f ms)\n", failed ? "FAIL" : "ok  ", c->name, (seconds() - start) * 1e3);
        fflush(stdout);
    }
}

// ---- main --------------------------------------------------------------------------------------

struct settings {
    struct comm_config config;
    const char *only;
    bool quick;
    bool big;
    const char *mismatch;
    const char *fault;
    const char *in;
    bool in_group;
    int64_t user_error;
    int64_t fact;
};

static void parse(struct settings *s, int argc, char **argv) {
    const struct arg table[] = {
        {.name = "--messages",
         .kind = ARG_FLAG,
         .value = &s->config.messages,
         .group = "cases",
         .help = "MPI messages instead of shared memory"},
        {.name = "--no-reading",
         .kind = ARG_FLAG,
         .value = &reading_forbidden,
         .help = "ranks may not read each other's memory"},
        {.name = "--check",
         .kind = ARG_FLAG,
         .value = &s->config.check,
         .help = "ranks compare what they call"},
        {.name = "--timeout",
         .kind = ARG_DOUBLE,
         .value = &s->config.timeout_s,
         .unit = "SECONDS",
         .help = "a call that takes longer ends the job"},
        {.name = "--log",
         .kind = ARG_STRING,
         .value = &s->config.log,
         .unit = "PREFIX",
         .help = "each rank's calls go to PREFIX.RANK"},
        {.name = "--only",
         .kind = ARG_STRING,
         .value = &s->only,
         .unit = "WORD",
         .help = "cases with this word in their names"},
        {.name = "--quick",
         .kind = ARG_FLAG,
         .value = &s->quick,
         .help = "no large numbers of elements"},
        {.name = "--big",
         .kind = ARG_FLAG,
         .value = &s->big,
         .help = "only calls beyond 2^31 elements, as far as memory goes"},
        {.name = "--mismatch",
         .kind = ARG_CHOICE,
         .value = &s->mismatch,
         .group = "misuse",
         .choices = "count|dtype|op|root|kind|order",
         .help = "the first rank calls something else"},
        {.name = "--fault",
         .kind = ARG_CHOICE,
         .value = &s->fault,
         .choices = "hang|die|stop|fatal|user|exit",
         .help = "the last rank fails at a call"},
        {.name = "--in",
         .kind = ARG_CHOICE,
         .value = &s->in,
         .choices = "all-reduce|reduce-scatter|all-gather|broadcast|send|recv|host|barrier|split|"
                    "finish",
         .help = "the call that differs, or does not come"},
        {.name = "--in-group",
         .kind = ARG_FLAG,
         .value = &s->in_group,
         .help = "in a group of every second rank"},
        {.name = "--user-error",
         .kind = ARG_INT,
         .value = &s->user_error,
         .min = -2,
         .max = 1e6,
         .unit = "RANK",
         .help = "error_user() on this rank, -1: on all; before comm_start()"},
        {.name = "--fact",
         .kind = ARG_INT,
         .value = &s->fact,
         .min = -2,
         .max = 1e6,
         .unit = "RANK",
         .help = "a fact differs on this rank"},
        {.kind = ARG_NONE},
    };
    const struct arg *const tables[] = {table};
    args_parse(argc, argv, "tests collectives between ranks", tables, 1);
}

// In a group of every second rank, only the group of rank 1 has a rank that fails.
static void misuse(struct comm c, const struct settings *s) {
    struct comm group = c;
    if (s->in_group) {
        group = comm_split(c, c.rank % 2, "odd or even");
    }
    bool here = !s->in_group || c.rank % 2 == 1;
    if (s->mismatch != NULL) {
        misuse_mismatch(group, here && group.rank == 0, s->mismatch, s->in);
    } else {
        misuse_fault(group, here && group.rank == group.size - 1, s->fault, s->in);
    }
    printf("rank %d: nothing happened\n", c.rank);
    fflush(stdout);
    comm_finish();
    exit(3);
}

static int run_cases(const struct settings *s) {
    int cases = 0;
    for (size_t i = 0; i < LENGTH(CASES); i++) {
        bool is_big = CASES[i].run == test_big;
        if (is_big == s->big && (s->only == NULL || strstr(CASES[i].name, s->only) != NULL)) {
            run_case(&CASES[i]);
            cases++;
        }
    }
    uint32_t failed = test.faults > 0;
    comm_max_u32(test.world.c, &failed);
    if (test.world.c.rank == 0) {
        printf("%s: %d cases on %d ranks, transport %s\n", failed ? "FAIL" : "PASS", cases,
               test.world.c.size, comm_transport());
    }
    return failed || cases == 0 ? 1 : 0;
}

int main(int argc, char **argv) {
    struct settings s = {
        .config.timeout_s = 120,
        .in = "all-reduce",
        .user_error = -2,
        .fact = -2,
    };
    struct comm c = comm_init();
    parse(&s, argc, argv);
    if (c.size > RANKS_MAX) {
        error_user("%d ranks: expected at most %d", c.size, RANKS_MAX);
    }
    if (s.user_error == c.rank || s.user_error == -1) {
        error_user("rank %d found 1, expected 2; use 2", c.rank);
    }
    comm_must_match("--seed", s.fact == c.rank ? "7" : "1");
    comm_must_match("the data", "the same");
    comm_start(c, &s.config);
    device_init(1, comm_local_size());
    if (s.mismatch != NULL || s.fault != NULL) {
        misuse(c, &s);
    }
    large = s.quick ? 0 : LENGTH(LARGE);
    world_open(c);
    int code = run_cases(&s);
    comm_finish();
    return code;
}
