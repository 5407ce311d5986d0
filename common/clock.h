// Time that passes, for durations.
#ifndef SHARD_CLOCK_H
#define SHARD_CLOCK_H

#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief Seconds on a clock that nobody sets. Local. Source: clock_gettime(2), CLOCK_MONOTONIC. */
static inline double clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#ifdef __cplusplus
}
#endif
#endif
