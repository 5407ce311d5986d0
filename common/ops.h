// Every tensor op, forward and backward. Implemented in cpu/ and cuda/; a missing one is a link
// error.
//
// All ops are Local. Shapes are (rows, cols); B samples of T positions are B*T rows. Outputs are
// allocated by the caller, written whole, and may not share memory with an input unless the
// op says so. On a GPU an op is enqueued and returns at once. Wrong shapes end the program (CHECK).
// Results do not depend on the number of threads: work is cut into pieces of fixed size, and sums
// over pieces are added in order.
#ifndef SHARD_OPS_H
#define SHARD_OPS_H

#include "random.h"
#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- values ------------------------------------------------------------------------------------

/** @brief y = 0. */
void ops_zero(struct tensor y);

/** @brief Every element of y = value. */
void ops_fill(struct tensor y, float value);

/** @brief y = x, cast to y's type. Same number of elements, any shape. */
void ops_copy(struct tensor y, struct tensor x);

/** @brief y += x. Same number of elements. */
void ops_add(struct tensor y, struct tensor x);

/** @brief y *= factor. */
void ops_scale(struct tensor y, float factor);

/**
 * @brief Where a tensor lies in a whole that is cut over ranks: element (i, j) of the tensor is
 * element (first_row + i, first_col + j) of the whole, which has whole_rows x whole_cols.
 *
 * What lies outside of the whole is padding.
 */
struct place {
    size_t first_row;
    size_t first_col;
    size_t whole_rows;
    size_t whole_cols;
};

/**
 * @brief Random start values from N(0, std^2); padding becomes 0.
 *
 * The element at (r, c) of the whole depends on the key and on r * whole_cols + c alone. By the
 * Box-Muller transform, elements 2i and 2i+1 from words 2i and 2i+1 of the stream.
 */
void ops_random_normal(struct tensor y, struct random_key key, struct place place, float std);

/** @brief Random start values, uniform in [-bound, bound); padding becomes 0. As above, one word an
 * element. */
void ops_random_uniform(struct tensor y, struct random_key key, struct place place, float bound);

// ---- linear layers -----------------------------------------------------------------------------

/**
 * @brief y = x w^T (+ bias).
 *
 * @param y    (R, N)
 * @param x    (R, K)
 * @param w    (N, K), as torch.nn.Linear has it
 * @param bias (N, 1), or no tensor
 */
void ops_linear(struct tensor y, struct tensor x, struct tensor w, struct tensor bias);

/**
 * @brief dx = dy w, or dx += dy w.
 *
 * @param dx  (R, K)
 * @param dy  (R, N)
 * @param w   (N, K)
 * @param add false: store; true: add to what dx holds
 */
void ops_linear_dx(struct tensor dx, struct tensor dy, struct tensor w, bool add);

/**
 * @brief dw = dy^T x, and dbias = the column sums of dy. With R = 0 both become 0.
 *
 * @param dw    (N, K)
 * @param dbias (N, 1), or no tensor
 * @param dy    (R, N)
 * @param x     (R, K)
 */
void ops_linear_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x);

// ---- llama -------------------------------------------------------------------------------------

/**
 * @brief y = the rows of w that the tokens name.
 *
 * @param y      (R, C)
 * @param tokens R numbers of type I32, each in [0, V)
 * @param w      (V, C)
 */
void ops_embedding(struct tensor y, struct tensor tokens, struct tensor w);

/** @brief dw (V, C) = for each token the sum of its rows of dy (R, C), added in row order; 0 for
 * tokens that do not occur. */
void ops_embedding_dw(struct tensor dw, struct tensor dy, struct tensor tokens);

/**
 * @brief Root-mean-square norm of each row: y = w * x / sqrt(mean(x^2) + eps).
 *
 * Source: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019, eq. 4.
 * @param y (R, C)
 * @param x (R, C)
 * @param w (C, 1)
 */
void ops_rmsnorm(struct tensor y, struct tensor x, struct tensor w, float eps);

/**
 * @brief Backward of ops_rmsnorm.
 *
 * @param dx  (R, C); stored, or added to what it holds
 * @param dw  (C, 1)
 * @param dy  (R, C)
 * @param add false: dx is stored; true: the gradient is added to dx (that of the residual path)
 */
void ops_rmsnorm_backward(struct tensor dx, struct tensor dw, struct tensor dy, struct tensor x,
                          struct tensor w, float eps, bool add);

/**
 * @brief The table of angles for ops_rope.
 *
 * Row t: cos(t * theta^(-2i/D)) for i = 0 … D/2-1, then the sines. Computed in double.
 * Source: Su et al., "RoFormer", 2021, eq. 15.
 * @param table (T, D)
 */
void ops_rope_table(struct tensor table, double theta);

/**
 * @brief Rotates x in place, in the rotate-half form of transformers: the pairs are (i, i + D/2).
 *
 * @param x       (B*T, heads*D); row r is position r % T
 * @param table   (T, D) of ops_rope_table
 * @param inverse false: forward; true: the backward, by the negative angle
 */
void ops_rope(struct tensor x, struct tensor table, bool inverse);

/**
 * @brief Causal attention with grouped key and value heads; the softmax scale is 1/sqrt(D).
 *
 * Query head h uses key head h / (heads / kv_heads). Scores are made in blocks and never kept:
 * what backward needs is y and lse. Source: Dao et al., "FlashAttention", 2022.
 * @param y   (B*T, heads*D)
 * @param lse (B*T, heads) f32: the logarithm of each softmax's denominator
 * @param q   (B*T, heads*D)
 * @param k   (B*T, kv_heads*D)
 * @param v   (B*T, kv_heads*D)
 * @param T   positions per sample
 * @param D   head dimension
 */
void ops_attention(struct tensor y, struct tensor lse, struct tensor q, struct tensor k,
                   struct tensor v, size_t T, size_t D);

/**
 * @brief Backward of ops_attention. Stores dq, dk and dv, shaped as q, k and v.
 *
 * dq may share memory with dy (same shape).
 */
void ops_attention_backward(struct tensor dq, struct tensor dk, struct tensor dv, struct tensor dy,
                            struct tensor y, struct tensor lse, struct tensor q, struct tensor k,
                            struct tensor v, size_t T, size_t D);

/**
 * @brief y = silu(gate) * up, where silu(a) = a / (1 + exp(-a)).
 *
 * Source: Shazeer, "GLU Variants Improve Transformer", 2020, eq. 6.
 * @param y (R, F); gate and up likewise
 */
void ops_swiglu(struct tensor y, struct tensor gate, struct tensor up);

/** @brief Backward of ops_swiglu: stores dgate and dup. dgate may be gate's memory or dy's, dup may
 * be up's. */
void ops_swiglu_backward(struct tensor dgate, struct tensor dup, struct tensor dy,
                         struct tensor gate, struct tensor up);

// ---- convolution -------------------------------------------------------------------------------

/** @brief A stride-1 convolution without padding, on images (samples, height*width*channels). */
struct conv {
    size_t in_channels;
    size_t out_channels;
    size_t height; // of the input; the output's is height - kernel + 1
    size_t width;
    size_t kernel;
};

/**
 * @brief y = x * w + bias, as torch.nn.Conv2d computes it.
 *
 * @param y    (B, out_height*out_width*out_channels): channels last
 * @param x    (B, height*width*in_channels): channels last
 * @param w    (out_channels, in_channels*kernel*kernel): in torch's order, out, in, ky, kx
 * @param bias (out_channels, 1)
 */
void ops_conv2d(struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                struct conv conv);

/** @brief dx, shaped as x, from dy, shaped as y. */
void ops_conv2d_dx(struct tensor dx, struct tensor dy, struct tensor w, struct conv conv);

/** @brief dw and dbias, shaped as w and bias. With no samples both become 0. */
void ops_conv2d_dw(struct tensor dw, struct tensor dbias, struct tensor dy, struct tensor x,
                   struct conv conv);

/** @brief x = max(x, 0), in place; NaN stays NaN. */
void ops_relu(struct tensor x);

/** @brief Backward of ops_relu, in place: dy becomes 0 where y, relu's output, is not above 0. */
void ops_relu_backward(struct tensor dy, struct tensor y);

/**
 * @brief Max-pool 2x2 with stride 2, and from channels last to channels first, as torch's flatten
 * expects it.
 *
 * @param y      (B, channels*(height/2)*(width/2)): channels first
 * @param winner same shape, U8: which of the four (0 … 3, row-major) was the largest, the first of
 *               equals
 * @param x      (B, height*width*channels): channels last
 */
void ops_max_pool(struct tensor y, struct tensor winner, struct tensor x, size_t channels,
                  size_t height, size_t width);

/** @brief Backward of ops_max_pool: stores dx, shaped as x, 0 where an element did not win. */
void ops_max_pool_backward(struct tensor dx, struct tensor dy, struct tensor winner,
                           size_t channels, size_t height, size_t width);

// ---- both models -------------------------------------------------------------------------------

/**
 * @brief y = x with each element dropped (0) with probability p, the others divided by 1 - p.
 *
 * The mask is a function of the key and the element's place in the whole (random_word at
 * (first_row + i) * whole_cols + first_col + j; it is dropped if the word is below p * 2^32), so
 * backward is the same call on dy, and no mask is stored. y may be x. With p = 0 it is a copy.
 */
void ops_dropout(struct tensor y, struct tensor x, float p, struct random_key key,
                 struct place place);

/*
 * Softmax and cross entropy in steps, so that a group of ranks may hold the columns of one matrix
 * of logits. This rank's logits are the columns first_col … of `whole` columns; columns beyond
 * that are padding and count for nothing.
 *   loss of a row = log(sum_j exp(logit_j - max)) - (logit_target - max)
 *   a row is right if its target is the first of the largest logits: of equal ones one counts
 * A target below 0 marks a row that does not count.
 */

/** @brief max (R, 1) f32 = the largest of each row of logits (R, n); -infinity if all are padding.
 */
void ops_row_max(struct tensor max, struct tensor logits, size_t first_col, size_t whole);

/**
 * @brief sum (R, 1) = sum of exp(logit - max) over this rank's columns, and target_logit (R, 1) =
 * logit - max of the row's target if it is among them, else 0.
 *
 * But -FLT_MIN instead of a 0 if a column before the target, among this rank's, has the max, too.
 * So the sum of target_logit over the ranks is 0 only where the target is the first of the largest,
 * while the loss, where log(sum) is at least log(2) then, does not change by a bit.
 * @param max     of the whole row: over all ranks
 * @param targets R numbers of type I32
 */
void ops_row_exp_sum(struct tensor sum, struct tensor target_logit, struct tensor logits,
                     struct tensor max, struct tensor targets, size_t first_col, size_t whole);

/**
 * @brief Stores loss[0] = the sum of the rows' losses, and loss[1] = in how many rows the target is
 * the first of the largest logits.
 *
 * @param loss         (1, 2) F64
 * @param sum          (R, 1) of ops_row_exp_sum(), summed over the ranks that hold the columns
 * @param target_logit (R, 1) likewise
 */
void ops_cross_entropy(struct tensor loss, struct tensor sum, struct tensor target_logit,
                       struct tensor targets);

/** @brief In place: logits become scale * d(loss sum) / d(logits) = scale * (softmax - onehot); 0
 * in rows that do not count and in padding. */
void ops_cross_entropy_backward(struct tensor logits, struct tensor max, struct tensor sum,
                                struct tensor targets, size_t first_col, size_t whole, float scale);

// ---- optimizer ---------------------------------------------------------------------------------

/** @brief The largest |x| of several tensors, as the bits of a float: bits order like the numbers,
 * infinity and NaN come last. Waits for the result. */
uint32_t ops_abs_max(const struct tensor *x, size_t tensor_count);

/**
 * @brief The sum of squares of several tensors as an integer, exact, so that no order or cut of the
 * elements changes it: each square in units of 2^(2e - 60), where 2^e <= max < 2^(e+1), rounded.
 *
 * Waits for the result. Undefined when max is 0, infinite or NaN.
 * Source: the idea of Demmel & Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
 * @param max_bits what ops_abs_max() returned (the largest over all ranks)
 */
unsigned __int128 ops_square_sum(const struct tensor *x, size_t tensor_count, uint32_t max_bits);

/** @brief One step of plain SGD: param -= lr * (scale * grad + decay * param). */
void ops_sgd(struct tensor param, struct tensor grad, float scale, float lr, float decay);

/** @brief What AdamW needs besides the tensors. */
struct adamw {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double decay;
    int64_t step; // 1 for the first step
};

/**
 * @brief One step of AdamW with g = scale * grad.
 *
 * Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2, in the
 * order of torch.optim.AdamW: decay first, then the step by lr/(1-beta1^t) * m /
 * (sqrt(v)/sqrt(1-beta2^t) + eps).
 */
void ops_adamw(struct tensor param, struct tensor m, struct tensor v, struct tensor grad,
               float scale, struct adamw a);

/**
 * @brief One step of Adadelta with g = scale * grad + decay * param.
 *
 * Source: Zeiler, "ADADELTA", 2012, algorithm 1, as torch.optim.Adadelta has it (delta times lr).
 */
void ops_adadelta(struct tensor param, struct tensor square_avg, struct tensor delta_avg,
                  struct tensor grad, float scale, float lr, float rho, float eps, float decay);

#ifdef __cplusplus
}
#endif
#endif
