// The transport of a single process: a group has one rank, so a collective is a copy or nothing.
#include "comm.h"
#include "error.h"
#include "ops.h"
#include <string.h>

const char *comm_transport(void) {
    return "self";
}

struct comm comm_self(void) {
    return (struct comm){
        .rank = 0,
        .size = 1,
    };
}

struct comm comm_init(void) {
    return comm_self();
}

int comm_local_size(void) {
    return 1;
}

void comm_must_match(const char *name, const char *value) {
    (void)name;
    (void)value;
}

void comm_start(struct comm c, const struct comm_config *config) {
    CHECK(c.size == 1);
    (void)config;
}

bool comm_finish(void) {
    return true;
}

struct comm comm_split(struct comm c, int color, const char *name) {
    CHECK(c.size == 1 && color >= 0);
    (void)name;
    return c;
}

struct comm_handle comm_all_reduce(struct comm c, struct tensor x, enum comm_op op) {
    CHECK(c.size == 1);
    (void)x;
    (void)op;
    return (struct comm_handle){0};
}

static struct comm_handle copy(struct comm c, struct tensor to, struct tensor from) {
    CHECK(c.size == 1);
    if (to.data != from.data) {
        ops_copy(to, from);
    }
    return (struct comm_handle){0};
}

struct comm_handle comm_reduce_scatter(struct comm c, struct tensor part, struct tensor whole) {
    return copy(c, part, whole);
}

struct comm_handle comm_all_gather(struct comm c, struct tensor whole, struct tensor part) {
    return copy(c, whole, part);
}

struct comm_handle comm_broadcast(struct comm c, struct tensor x, int root) {
    CHECK(c.size == 1 && root == 0);
    (void)x;
    return (struct comm_handle){0};
}

// With one rank there is nobody to send to.
struct comm_handle comm_send(struct comm c, struct tensor x, int to) {
    (void)x;
    error_fatal(__FILE__, __LINE__, "send to rank %d of %d", to, c.size);
}

struct comm_handle comm_recv(struct comm c, struct tensor x, int from) {
    (void)x;
    error_fatal(__FILE__, __LINE__, "receive from rank %d of %d", from, c.size);
}

void comm_wait(struct comm_handle handle) {
    CHECK(handle.ticket == 0);
}

void comm_barrier(struct comm c) {
    CHECK(c.size == 1);
}

void comm_sum_f64(struct comm c, double *x, size_t count) {
    CHECK(c.size == 1);
    (void)x;
    (void)count;
}

void comm_max_u32(struct comm c, uint32_t *x) {
    CHECK(c.size == 1);
    (void)x;
}

void comm_sum_u128(struct comm c, unsigned __int128 *x) {
    CHECK(c.size == 1);
    (void)x;
}

void comm_broadcast_host(struct comm c, void *data, size_t bytes, int root) {
    CHECK(c.size == 1 && root == 0);
    (void)data;
    (void)bytes;
}

void comm_gather_host(struct comm c, void *all, const void *data, size_t bytes) {
    CHECK(c.size == 1);
    memcpy(all, data, bytes);
}

void comm_send_host(struct comm c, const void *data, size_t bytes, int to) {
    (void)data;
    (void)bytes;
    error_fatal(__FILE__, __LINE__, "send to rank %d of %d", to, c.size);
}

void comm_recv_host(struct comm c, void *data, size_t bytes, int from) {
    (void)data;
    (void)bytes;
    error_fatal(__FILE__, __LINE__, "receive from rank %d of %d", from, c.size);
}

struct comm_stats comm_group_stats(struct comm c) {
    CHECK(c.size == 1);
    return (struct comm_stats){0};
}

struct comm_stats comm_stats(void) {
    return (struct comm_stats){0};
}
