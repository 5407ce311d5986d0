// The device: one CPU (all threads of this process) or one GPU. Implemented in cpu/ and cuda/.
#ifndef SHARD_DEVICE_H
#define SHARD_DEVICE_H

#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * @brief Gets the device ready; call it once, before the first tensor.
 *
 * Local. On a CPU @p threads is the number of compute threads; results do not depend on it. On a
 * GPU it is ignored. Many more threads than cores are the user's mistake.
 * @param threads 0: the cores that this process may use, divided by @p sharers
 * @param sharers processes that share this machine, see comm_local_size()
 */
void device_init(int threads, int sharers);

/** @brief Compute threads of this process (1 on a GPU). */
int device_threads(void);

/** @brief A short description, "CPU: 2 threads, AVX-512, oneDNN 2.6.3, OpenBLAS 0.3.21". Lives as
 * long as the program. */
const char *device_name(void);

/** @brief Raw device memory, aligned to 64 bytes, for mem.c alone; NULL when there is none. */
void *device_alloc(size_t bytes);

/** @brief Frees what device_alloc() returned. */
void device_free(void *data);

/** @brief The memory that the device has in all, in bytes. On a CPU that of the machine, or as much
 * of it as the container may use. Local. */
size_t device_memory_bytes(void);

/** @brief Fills memory with NaN (all bits one), so that a use before the first write or after the
 * free shows. */
void device_poison(void *data, size_t bytes);

/** @brief Copies tensor_count(t) elements from host memory into @p t. Returns when @p host may be
 * used again. Local. */
void device_upload(struct tensor t, const void *host);

/** @brief Copies @p t into host memory, after all ops enqueued before. Returns when the copy is
 * complete. Local. */
void device_download(void *host, struct tensor t);

/** @brief Where the host can read and write the elements of @p t; NULL if it cannot, on a GPU.
 * Local. For the transports of comm.h alone. */
void *device_host_view(struct tensor t);

/** @brief Waits for everything enqueued so far. Local. */
void device_sync(void);

#ifdef __cplusplus
}
#endif
#endif
