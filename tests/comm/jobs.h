// What the cases of test_comm share: groups whose results are known, and jobs, which are calls from
// the filling of their buffers to the comparison.
#ifndef SHARD_TESTS_JOBS_H
#define SHARD_TESTS_JOBS_H

#include "comm.h"
#include "tensor.h"
#include "values.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    RANKS_MAX = 16,
    JOBS_MAX = 1024, // calls in flight at once
    NAME_BYTES = 32,
};

#define LENGTH(array) (sizeof(array) / sizeof *(array))

/** @brief A group, and what a reduction over it must give. */
struct group {
    struct comm c;
    char name[NAME_BYTES];
    int members[RANKS_MAX]; // (c.size) ranks of the job, in the order of the group
    struct values sum[DTYPES];
    struct values max[DTYPES];
};

/** @brief One call. What the ranks hold depends on `number`, so no two calls mix unnoticed. */
struct job {
    const struct group *group;
    enum comm_kind kind;
    enum comm_op op;
    enum dtype dtype;
    size_t count; // elements of x; of a part, for reduce-scatter and all-gather
    int peer; // root, to, from
    bool in_place;
    size_t shift; // of the values, and of the place in memory
    struct tensor x; // whole, for reduce-scatter and all-gather
    struct tensor part;
    struct comm_handle handle;
};

/** @brief The state of the tests. */
struct test {
    struct group world;
    const char *name; // of the case
    int faults; // cases that failed on this rank
    int case_faults; // in this case
    uint64_t hash; // of the results of this case that must be the same on all ranks
    struct job jobs[JOBS_MAX]; // the list
    size_t job_count;
};
extern struct test test;

/** @brief Seconds on a clock that all processes of a machine share. Local. */
double seconds(void);

/** @brief Notes a failure of this case; the first one of a case is printed. Local. */
void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** @brief Makes test.world of the group of all ranks. Local. */
void world_open(struct comm c);

/** @brief Cuts a group: the members with the same color. Collective over the parent.
 * @param colors (parent->c.size) of all members */
struct group group_split(const struct group *parent, const int *colors, const char *name);

/** @brief Works out what reductions over g->members give. Local; group_close() frees it. */
void group_values(struct group *g);
void group_close(struct group *g);

/** @brief What a member of the group holds. Local. */
const struct values *member_values(const struct group *g, int member, enum dtype dtype);

/** @brief Appends a job to the list; the caller changes what is not usual. Local.
 * @param number the same on all ranks of the group */
struct job *job_add(const struct group *g, enum comm_kind kind, enum dtype dtype, size_t count,
                    size_t number);

/** @brief Fills the buffers and makes the call. */
void job_start(struct job *job);

/** @brief Compares the results of a call that was waited for, and frees the buffers. Local. */
void job_check(struct job *job);

/** @brief Starts all jobs of the list, waits for them in an order that changes from run to run and
 * differs between ranks, and compares each one while the rest is in flight. Empties the list. */
void jobs_run(void);

/** @brief Waits for all jobs of the list, which were started, in order; compares; empties the list.
 */
void jobs_finish(void);

#endif
