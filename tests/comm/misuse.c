#include "misuse.h"
#include "error.h"
#include "ops.h"
#include "tensor.h"
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The numbers of elements of the best known case: what two ways of padding make of the same layer.
enum {
    COUNT = 409598,
    OTHER_COUNT = 409600,
};

// One call, as a rank makes it.
struct call {
    const char *kind;
    size_t count; // of a part, for reduce-scatter and all-gather
    enum dtype dtype;
    enum comm_op op;
    int root;
};

static bool is(const char *word, const char *other) {
    return strcmp(word, other) == 0;
}

static struct tensor tensor(size_t count, enum dtype dtype) {
    struct tensor t = tensor_alloc(1, count, dtype, MEM_COMM);
    ops_zero(t);
    return t;
}

static struct comm_handle call_host(struct comm c, const struct call *call) {
    double *x = calloc(call->count, sizeof *x);
    CHECK(x != NULL);
    comm_sum_f64(c, x, call->count);
    free(x);
    return (struct comm_handle){0};
}

// Memory is not freed: nobody comes back from the calls that this file is about.
static struct comm_handle begin(struct comm c, const struct call *call) {
    struct tensor x = tensor(call->count, call->dtype);
    struct tensor whole = tensor(call->count * (size_t)c.size, call->dtype);
    if (is(call->kind, "all-reduce")) {
        return comm_all_reduce(c, x, call->op);
    }
    if (is(call->kind, "reduce-scatter")) {
        return comm_reduce_scatter(c, x, whole);
    }
    if (is(call->kind, "all-gather")) {
        return comm_all_gather(c, whole, x);
    }
    if (is(call->kind, "broadcast")) {
        return comm_broadcast(c, x, call->root);
    }
    bool sends = is(call->kind, "send"); // rank 0 does, to rank 1; else the other way round
    if ((sends || is(call->kind, "recv")) && c.rank < 2) {
        return sends == (c.rank == 0) ? comm_send(c, x, 1 - c.rank) : comm_recv(c, x, 1 - c.rank);
    }
    if (is(call->kind, "host")) {
        return call_host(c, call);
    }
    if (is(call->kind, "barrier")) {
        comm_barrier(c);
    } else if (is(call->kind, "split")) {
        comm_split(c, 0, "late");
    } else if (is(call->kind, "finish")) {
        comm_finish();
    }
    return (struct comm_handle){0};
}

static struct call usual(const char *kind) {
    return (struct call){
        .kind = kind,
        .count = COUNT,
        .dtype = DTYPE_BF16,
        .op = COMM_SUM,
        .root = 0,
    };
}

// Some calls on which all ranks agree come first, so that the numbers of calls are not 0.
static void warm_up(struct comm c) {
    struct call all_reduce = usual("all-reduce"), broadcast = usual("broadcast");
    comm_wait(begin(c, &all_reduce));
    comm_wait(begin(c, &broadcast));
}

void misuse_mismatch(struct comm c, bool differs, const char *what, const char *in) {
    bool has_op = is(in, "all-reduce"), has_root = is(in, "broadcast");
    struct call call = usual(in), other = usual(is(in, "all-gather") ? "all-reduce" : "all-gather");
    if (c.size < 2 || (is(what, "op") && !has_op) || (is(what, "root") && !has_root)) {
        error_user("--mismatch %s does not go with --in %s on %d ranks", what, in, c.size);
    }
    warm_up(c);
    if (is(what, "count")) {
        call.count = differs ? OTHER_COUNT : COUNT;
    } else if (is(what, "dtype")) { // of the same size
        call.dtype = differs ? DTYPE_F16 : DTYPE_BF16;
    } else if (is(what, "op")) {
        call.op = differs ? COMM_MAX : COMM_SUM;
    } else if (is(what, "root")) {
        call.root = differs ? 1 : 0;
    } else if (is(what, "kind")) {
        call = differs ? other : call;
    }
    if (is(what, "order")) {
        struct comm_handle first = begin(c, differs ? &other : &call);
        struct comm_handle second = begin(c, differs ? &call : &other);
        comm_wait(first);
        comm_wait(second);
    } else {
        comm_wait(begin(c, &call));
    }
}

static void fail(const char *fault) {
    if (is(fault, "hang")) {
        for (;;) {
            pause();
        }
    } else if (is(fault, "die")) {
        raise(SIGKILL);
    } else if (is(fault, "stop")) {
        raise(SIGSTOP);
    } else if (is(fault, "fatal")) {
        error_fatal(__FILE__, __LINE__, "the test wants it: found %d, expected %d", 1, 2);
    } else if (is(fault, "user")) {
        error_user("the test wants it: found 1, expected 2; nothing to do");
    } else if (is(fault, "exit")) {
        exit(3);
    }
}

void misuse_fault(struct comm c, bool fails, const char *fault, const char *in) {
    struct call call = usual(in);
    warm_up(c);
    if (fails) {
        fail(fault);
    }
    comm_wait(begin(c, &call));
}
