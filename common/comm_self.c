// The transport of a single process: a group has one rank, so a collective is a copy or nothing.
#include "comm.h"
#include "error.h"
#include "ops.h"

struct comm comm_self(void) {
    return (struct comm){
        .rank = 0,
        .size = 1,
    };
}

struct comm comm_init(void) {
    return comm_self();
}

void comm_agree(struct comm c) {
    CHECK(c.size == 1);
}

void comm_finish(void) {
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

void comm_wait(struct comm_handle handle) {
    CHECK(handle.ticket == 0);
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
