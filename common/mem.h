// The memory account: every byte that a tensor uses is charged to a category.
#ifndef SHARD_MEM_H
#define SHARD_MEM_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum mem_category {
    MEM_PARAMS, // the parameters that this rank keeps
    MEM_GRADS, // the gradients that this rank keeps
    MEM_OPTIMIZER, // moments and other state of the optimizer
    MEM_ACTIVATIONS, // batches, and what forward leaves for backward
    MEM_COMM, // gathered parameters, fresh unit gradients, buckets
    MEM_WORKSPACE, // inside one op, gone when it returns
    MEM_CATEGORIES,
};

/** @brief The account of a process, in bytes. */
struct mem_stats {
    size_t now_bytes; // allocated at this moment
    size_t now_by_category[MEM_CATEGORIES]; // its parts
    size_t peak_bytes; // the largest now_bytes since mem_reset_peak()
    size_t peak_by_category[MEM_CATEGORIES]; // its parts at that moment; they add up to it
    size_t highest_by_category[MEM_CATEGORIES]; // each category's own largest, at its own moment
};

/**
 * @brief Allocates device memory, aligned to 64 bytes, and charges it to a category.
 *
 * Local; thread-safe. The content is undefined (NaN in debug builds). The charge is exactly
 * @p bytes. Blocks that were freed are kept and used again, so that a training step does not go to
 * the system for memory.
 * @return never NULL; when there is no memory, or all together would be more than
 *         device_memory_bytes(), it is the user's mistake, told with the account by category
 */
void *mem_alloc(size_t bytes, enum mem_category category);

/** @brief Frees what mem_alloc returned, and takes the same charge back. NULL is ignored. Local. */
void mem_free(void *data, size_t bytes, enum mem_category category);

/**
 * @brief @p count zeroed elements of @p size bytes of host memory, for tables whose length the
 * flags decide; not in the account.
 *
 * Local. Free it with free().
 * @return never NULL; when there is no memory, it is the user's mistake
 */
void *mem_table(size_t count, size_t size);

/** @brief The account of this process. Local. */
struct mem_stats mem_stats(void);

/** @brief Forgets the peak: it starts again from what is allocated now. Local. */
void mem_reset_peak(void);

/** @brief "params", "grads", "optimizer", "activations", "comm", "workspace". */
const char *mem_category_name(enum mem_category category);

/** @brief The largest resident size of this process so far as the kernel counts it (VmHWM), in
 * bytes; 0 where the system does not say. Local. */
size_t mem_process_peak_bytes(void);

/**
 * @brief Records the account over time: from now on every change is a line in @p path.
 *
 * Local. Lines are `microseconds<TAB>bytes of each category…`, with a header line.
 * @return false with errno if the file cannot be written.
 */
bool mem_timeline_start(const char *path);

/** @brief Ends the timeline and closes its file; false if a write failed. Local. */
bool mem_timeline_stop(void);

#ifdef __cplusplus
}
#endif
#endif
