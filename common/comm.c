// What all transports share.
#include "comm.h"

const char *comm_kind_name(enum comm_kind kind) {
    static const char *const NAMES[] = {
        [COMM_ALL_REDUCE] = "all-reduce",
        [COMM_REDUCE_SCATTER] = "reduce-scatter",
        [COMM_ALL_GATHER] = "all-gather",
        [COMM_BROADCAST] = "broadcast",
        [COMM_SEND] = "send",
        [COMM_RECV] = "recv",
        [COMM_HOST] = "host",
    };
    return NAMES[kind];
}
