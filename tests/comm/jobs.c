#include "jobs.h"
#include "device.h"
#include "error.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    FRAME = 64, // elements of all bits one before and after every tensor
    FAULTS_MAX = 8, // printed by one rank
};

static const enum dtype REDUCED[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F64, DTYPE_I32};

struct test test;
static struct values ranks[DTYPES][RANKS_MAX]; // what each rank of the job holds

double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void fault(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (test.case_faults == 0 && test.faults < FAULTS_MAX) {
        fprintf(stderr, "FAIL rank %d: %s: %s\n", test.world.c.rank, test.name, text);
    }
    if (test.case_faults++ == 0) {
        test.faults++;
    }
}

// ---- groups ------------------------------------------------------------------------------------

const struct values *member_values(const struct group *g, int member, enum dtype dtype) {
    return &ranks[dtype][g->members[member]];
}

void group_values(struct group *g) {
    for (size_t d = 0; d < LENGTH(REDUCED); d++) {
        enum dtype dtype = REDUCED[d];
        struct values parts[RANKS_MAX];
        for (int m = 0; m < g->c.size; m++) {
            parts[m] = *member_values(g, m, dtype);
        }
        g->sum[dtype] = values_reduced(parts, g->c.size, COMM_SUM);
        g->max[dtype] = values_reduced(parts, g->c.size, COMM_MAX);
    }
}

void world_open(struct comm c) {
    struct group *g = &test.world;
    g->c = c;
    snprintf(g->name, sizeof g->name, "world");
    for (int r = 0; r < c.size; r++) {
        g->members[r] = r;
        for (int d = 0; d < DTYPES; d++) {
            ranks[d][r] = values_of_rank(r, c.size, (enum dtype)d);
        }
    }
    group_values(g);
}

// Members that have another color, by the color of each member of the parent.
struct group group_split(const struct group *parent, const int *colors, const char *name) {
    struct group g = {0};
    int size = 0, rank = -1, me = parent->c.rank;
    for (int m = 0; m < parent->c.size; m++) {
        if (colors[m] == colors[me]) {
            rank = m == me ? size : rank;
            g.members[size++] = parent->members[m];
        }
    }
    char copy[NAME_BYTES]; // the name may go away
    snprintf(copy, sizeof copy, "%s", name);
    g.c = comm_split(parent->c, colors[me], copy);
    memset(copy, '?', sizeof copy - 1);
    snprintf(g.name, sizeof g.name, "%s", name);
    if (g.c.size != size || g.c.rank != rank) {
        fault("group %s: found rank %d of %d, expected %d of %d", name, g.c.rank, g.c.size, rank,
              size);
        g.c.size = size;
    }
    group_values(&g);
    return g;
}

// The communicator lasts until comm_finish().
void group_close(struct group *g) {
    for (int d = 0; d < DTYPES; d++) {
        values_free(&g->sum[d]);
        values_free(&g->max[d]);
    }
}

// ---- jobs --------------------------------------------------------------------------------------

// A tensor that starts at an odd place, in a frame of all bits one.
static struct tensor framed(const struct job *job, size_t count) {
    size_t before = FRAME + job->shift % 7;
    struct tensor memory = tensor_alloc(1, before + count + FRAME, job->dtype, MEM_COMM);
    device_poison(memory.data, tensor_count(memory) * dtype_size(job->dtype));
    return tensor_view(memory, before, 1, count);
}

static void job_fault(const struct job *job, const char *what, size_t element, const char *text) {
    static const char *const ops[] = {"SUM", "MAX"};
    fault("%s%s%s of %zu %s, group %s (%d of %d), peer %d%s, shift %zu: %s element %zu: %s",
          comm_kind_name(job->kind), job->kind == COMM_ALL_REDUCE ? " " : "",
          job->kind == COMM_ALL_REDUCE ? ops[job->op] : "", job->count, dtype_name(job->dtype),
          job->group->name, job->group->c.rank, job->group->c.size, job->peer,
          job->in_place ? ", in place" : "", job->shift, what, element, text);
}

static void check_ones(const struct job *job, struct tensor t, const char *what) {
    unsigned char bytes[(FRAME + 8) * sizeof(double)];
    device_download(bytes, t);
    for (size_t i = 0; i < tensor_count(t) * dtype_size(t.dtype); i++) {
        if (bytes[i] != 0xff) {
            job_fault(job, what, i / dtype_size(t.dtype), "written, which is not the call's");
            return;
        }
    }
}

static void unframe(const struct job *job, struct tensor t) {
    if (!tensor_exists(t)) {
        return;
    }
    size_t before = FRAME + job->shift % 7, count = tensor_count(t);
    struct tensor memory = t;
    memory.data = (struct device_data *)((char *)t.data - before * dtype_size(t.dtype));
    memory.rows = 1;
    memory.cols = before + count + FRAME;
    check_ones(job, tensor_view(memory, 0, 1, before), "before the tensor,");
    check_ones(job, tensor_view(memory, before + count, 1, FRAME), "after the tensor,");
    tensor_free(&memory);
}

static bool has_parts(const struct job *job) {
    return job->kind == COMM_REDUCE_SCATTER || job->kind == COMM_ALL_GATHER;
}

// What this rank puts in. Outputs keep all bits one.
static void job_fill(struct job *job) {
    const struct comm c = job->group->c;
    const struct values *mine = member_values(job->group, c.rank, job->dtype);
    size_t place = (size_t)c.rank * job->count;
    job->x = framed(job, job->count * (has_parts(job) ? (size_t)c.size : 1));
    if (has_parts(job)) {
        job->part =
            job->in_place ? tensor_view(job->x, place, 1, job->count) : framed(job, job->count);
    }
    if (job->kind == COMM_ALL_GATHER) {
        values_fill(job->part, mine, job->shift + place);
    } else if (job->kind != COMM_RECV && !(job->kind == COMM_BROADCAST && job->peer != c.rank)) {
        values_fill(job->x, mine, job->shift);
    }
}

void job_start(struct job *job) {
    const struct comm c = job->group->c;
    job_fill(job);
    switch (job->kind) {
    case COMM_ALL_REDUCE:
        job->handle = comm_all_reduce(c, job->x, job->op);
        break;
    case COMM_REDUCE_SCATTER:
        job->handle = comm_reduce_scatter(c, job->part, job->x);
        break;
    case COMM_ALL_GATHER:
        job->handle = comm_all_gather(c, job->x, job->part);
        break;
    case COMM_BROADCAST:
        job->handle = comm_broadcast(c, job->x, job->peer);
        break;
    case COMM_SEND:
        job->handle = comm_send(c, job->x, job->peer);
        break;
    case COMM_RECV:
        job->handle = comm_recv(c, job->x, job->peer);
        break;
    default:
        CHECK(false);
    }
}

static void check(const struct job *job, const char *what, struct tensor t,
                  const struct values *values, size_t shift) {
    size_t wrong;
    char text[160];
    if (!values_check(t, values, shift, &wrong, text, sizeof text)) {
        job_fault(job, what, wrong, text);
    }
}

static void check_reduce_scatter(const struct job *job) {
    const struct group *g = job->group;
    const struct values *mine = member_values(g, g->c.rank, job->dtype);
    size_t n = job->count, place = (size_t)g->c.rank * n, after = place + n;
    check(job, "part,", job->part, &g->sum[job->dtype], job->shift + place);
    if (!job->in_place) {
        check(job, "input,", job->x, mine, job->shift);
        return;
    }
    struct tensor tail = tensor_view(job->x, after, 1, (size_t)g->c.size * n - after);
    check(job, "input before the part,", tensor_view(job->x, 0, 1, place), mine, job->shift);
    check(job, "input after the part,", tail, mine, job->shift + after);
}

static void check_all_gather(const struct job *job) {
    const struct group *g = job->group;
    for (int m = 0; m < g->c.size; m++) {
        size_t place = (size_t)m * job->count;
        check(job, "whole, in one part,", tensor_view(job->x, place, 1, job->count),
              member_values(g, m, job->dtype), job->shift + place);
    }
    check(job, "input,", job->part, member_values(g, g->c.rank, job->dtype),
          job->shift + (size_t)g->c.rank * job->count);
}

void job_check(struct job *job) {
    const struct group *g = job->group;
    const struct values *from = member_values(g, job->peer, job->dtype);
    switch (job->kind) {
    case COMM_ALL_REDUCE:
        check(job, "result,", job->x,
              job->op == COMM_MAX ? &g->max[job->dtype] : &g->sum[job->dtype], job->shift);
        break;
    case COMM_REDUCE_SCATTER:
        check_reduce_scatter(job);
        break;
    case COMM_ALL_GATHER:
        check_all_gather(job);
        break;
    case COMM_SEND:
        check(job, "input,", job->x, member_values(g, g->c.rank, job->dtype), job->shift);
        break;
    default: // broadcast, receive
        check(job, "result,", job->x, from, job->shift);
    }
    bool same =
        job->kind == COMM_ALL_REDUCE || job->kind == COMM_ALL_GATHER || job->kind == COMM_BROADCAST;
    if (same && g->c.size == test.world.c.size) {
        // A sum, since ranks wait in different orders.
        test.hash += values_hash(job->x, job->shift);
    }
    if (!job->in_place) {
        unframe(job, job->part);
    }
    unframe(job, job->x);
}

// ---- many jobs ---------------------------------------------------------------------------------

struct job *job_add(const struct group *g, enum comm_kind kind, enum dtype dtype, size_t count,
                    size_t number) {
    CHECK(test.job_count < JOBS_MAX);
    struct job *job = &test.jobs[test.job_count++];
    *job = (struct job){
        .group = g,
        .kind = kind,
        .dtype = dtype,
        .count = count,
        .shift = number * 37 + count + (size_t)kind * 7,
    };
    return job;
}

// The jobs in the order in which this rank waits for them; ranks differ.
static void waiting_order(size_t *order, unsigned round) {
    unsigned how = (round + (unsigned)test.world.c.rank) % 3;
    uint32_t random = round * 2654435761u + (unsigned)test.world.c.rank + 1;
    for (size_t i = 0; i < test.job_count; i++) {
        order[i] = how == 1 ? test.job_count - 1 - i : i;
    }
    for (size_t i = test.job_count; how == 2 && i > 1; i--) {
        random = random * 1664525 + 1013904223;
        size_t j = (random >> 8) % i, kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
}

void jobs_run(void) {
    static unsigned round;
    static size_t order[JOBS_MAX];
    for (size_t i = 0; i < test.job_count; i++) {
        job_start(&test.jobs[i]);
    }
    waiting_order(order, round++);
    for (size_t i = 0; i < test.job_count; i++) {
        comm_wait(test.jobs[order[i]].handle);
        job_check(&test.jobs[order[i]]);
    }
    test.job_count = 0;
}

void jobs_finish(void) {
    for (size_t i = 0; i < test.job_count; i++) {
        comm_wait(test.jobs[i].handle);
        job_check(&test.jobs[i]);
    }
    test.job_count = 0;
}
