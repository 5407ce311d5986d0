// What the files of convolution share: conv.c checks and chooses, conv_winograd.c is for 3x3
// kernels.
#ifndef SHARD_CPU_CONV_H
#define SHARD_CPU_CONV_H

#include "ops.h"

// Samples whose weight gradients are summed up by one thread. The sums of these chunks are then
// added in order, so that the number of threads changes no bit.
enum { CONV_CHUNK = 8 };

/** @brief Adds all rows to the first, in order, and returns that. Local.
 * @param chunks (at least 1, any) */
struct tensor conv_add_chunks(struct tensor chunks);

/** @brief Whether the functions below can do it: 3x3 kernels, and channels in multiples of 16. */
bool winograd_fits(struct conv c);

/** @brief ops_conv2d(), for shapes that fit. Local. */
void winograd_forward(struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                      struct conv c);

/** @brief ops_conv2d_dx(), for shapes that fit. Local. */
void winograd_dx(struct tensor dx, struct tensor dy, struct tensor w, struct conv c);

/** @brief ops_conv2d_dw(), for shapes that fit and at least one sample. Local. */
void winograd_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x,
                 struct conv c);

#endif
