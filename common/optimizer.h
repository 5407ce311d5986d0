// Optimizers, learning rate, and the global norm, over the list of what this rank updates.
#ifndef SHARD_OPTIMIZER_H
#define SHARD_OPTIMIZER_H

#include "options.h"
#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { OPTIMIZER_STATES_MAX = 2 };

/** @brief A parameter, or the part of it that this rank updates. All tensors have the same count.
 */
struct piece {
    struct tensor param; // view
    struct tensor grad; // view, f32
    struct tensor state[OPTIMIZER_STATES_MAX]; // views, f32: moments
    bool decay; // weight decay applies
    bool replica; // another rank counts it in the norm
};

/** @brief How many state tensors the optimizer needs per parameter: sgd 0, adamw 2, adadelta 2. */
int optimizer_states(const struct options *o);

/** @brief Their names in checkpoint files: "exp_avg" and "exp_avg_sq", "square_avg" and
 * "acc_delta". */
const char *optimizer_state_name(const struct options *o, int state);

/**
 * @brief The learning rate of a step, counted from 0.
 *
 * Local. Linear warm-up over the first `warmup` steps to lr: lr * (step + 1) / warmup. Then
 * constant; or cosine, down to min_lr at the last step of the training (Loshchilov & Hutter,
 * "SGDR", 2017, eq. 5); or step: lr * gamma^epoch.
 * @param steps           of the whole training
 * @param steps_per_epoch for the schedule step
 */
double learning_rate(const struct options *o, int64_t step, int64_t steps, int64_t steps_per_epoch);

/**
 * @brief One optimizer step over all pieces, with gradients multiplied by @p scale.
 *
 * Local.
 * @param step  counted from 0
 * @param scale what clipping makes of the gradients: 1, or clip / norm
 */
void optimizer_step(const struct options *o, const struct piece *pieces, size_t count, double lr,
                    double scale, int64_t step);

/** @brief The largest |gradient| of the pieces, as the bits of a float; replicas are left out.
 * Local; take the largest of all ranks before norm_squares(). */
uint32_t norm_max(const struct piece *pieces, size_t count);

/** @brief The sum of squared gradients of the pieces, in units that max_bits fixes; replicas are
 * left out. Local; exact, so the sum over ranks has the same bits for every cut. */
unsigned __int128 norm_squares(const struct piece *pieces, size_t count, uint32_t max_bits);

/** @brief The norm from the two sums: 0, a number, infinity or NaN. Local. */
double norm_root(unsigned __int128 squares, uint32_t max_bits);

/** @brief What the gradients are multiplied by so that their norm is at most @p clip: min(1,
 * clip / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it; 1 if clip is 0. Local. */
double clip_scale(double norm, double clip);

#ifdef __cplusplus
}
#endif
#endif
