// A model is a sequence of units 0 … model_units-1; y of unit u is x of unit u+1.
//
// llama.c and mnist.c of a chapter both define these functions; the program links one of them. A
// unit is what FSDP gathers, the smallest stage of a pipeline, and what recompute runs again.
// Nothing here is global state: everything is reached through the arguments.
#ifndef SHARD_MODEL_H
#define SHARD_MODEL_H

#include "args.h"
#include "comm.h"
#include "data.h"
#include "ops.h"
#include "options.h"
#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief How the ranks of a tensor-parallel group cut a parameter. */
enum split {
    SPLIT_NONE, // every rank has all of it
    SPLIT_ROWS,
    SPLIT_COLS,
};

enum {
    PARAM_NAME_MAX = 80,
    PARAM_DIMS_MAX = 4,
    UNIT_PARAMS_MAX = 16,
    SAVED_MAX = 16,
};

/** @brief A parameter of a unit: this rank's part of it, and its place in the whole. */
struct param {
    char name[PARAM_NAME_MAX]; // in files: "model.layers.0.self_attn.q_proj.weight"
    size_t rows; // this rank's part, with padding; a vector is (C, 1)
    size_t cols;
    size_t offset; // of its first element in the unit's flat buffer
    struct place place; // where this rank's part lies in the whole
    size_t shape[PARAM_DIMS_MAX]; // of the whole in files: (whole_rows, …)
    int dims;
    bool decay; // weight decay applies: to matrices, not to biases and the weights of norms
    enum split split;
};

/** @brief A micro-batch. */
struct batch {
    struct tensor input; // (samples, data_input_cols)
    struct tensor targets; // (samples, data_target_cols) I32
    size_t samples; // may be 0
    uint64_t first_sample; // position of the first sample, counted from the start of training
    float scale; // d(what is minimised) / d(loss sum): 1 / targets of the global batch
    bool train; // dropout is on
    struct tensor loss; // (1, 2) F64: the last unit STORES {loss sum, right answers}; never adds
};

/** @brief What the forward of a unit leaves for its backward. */
struct saved {
    struct tensor x; // the unit's input, owned; all that recompute keeps
    struct tensor t[SAVED_MAX]; // the rest, in the model's own order; may be dropped and made again
};

struct model;

// ---- set-up ------------------------------------------------------------------------------------

/** @brief A model with default sizes. Local. Writes the model's defaults into @p o and keeps the
 * pointer. */
struct model *model_create(struct options *o);

/** @brief The model's own flags, for options_parse(); ended by ARG_NONE; lives as long as m. */
const struct arg *model_args(struct model *m);

/**
 * @brief Fixes the sizes, after the flags were read.
 *
 * Local. Sizes that cannot be are the user's mistake.
 * @param tp the ranks that share each layer; comm_self() before chapter 04
 */
void model_init(struct model *m, struct comm tp);

/** @brief Frees the model. Local. */
void model_free(struct model *m);

/** @brief "llama" or "mnist". */
const char *model_name(const struct model *m);

/** @brief What a target is called in reports: "tokens" or "images". */
const char *model_item(const struct model *m);

/** @brief One line on sizes for the header: "vocab 256, dim 128, 4 layers, …". */
void model_describe(const struct model *m, char *text, size_t size);

/** @brief Writes config.json, as Hugging Face's transformers reads it. Local. */
void model_write_config(const struct model *m, FILE *file);

/** @brief Opens the data that the model learns from. Local; broken data is the user's mistake. */
struct data *model_data(const struct model *m);

// ---- units -------------------------------------------------------------------------------------

/** @brief How many units the model has, over all stages. */
int model_units(const struct model *m);

/** @brief Fills out[] with the parameters of unit u, also of one that other ranks run. Local.
 * @return how many, at most UNIT_PARAMS_MAX */
int unit_params(const struct model *m, int u, struct param *out);

/** @brief Elements of the unit's flat buffer. Each parameter begins at a multiple of 16 elements
 * (64 bytes); the elements between are padding, 0 for ever. */
size_t unit_size(const struct model *m, int u);

/** @brief Start values, the same for every cut. Local.
 * @param params (unit_size, 1) */
void unit_init(const struct model *m, int u, struct tensor params);

/** @brief The shape of y, without memory: what the next stage of a pipeline must receive. Local. */
struct tensor unit_output(const struct model *m, int u, const struct batch *b);

/**
 * @brief Forward of one unit.
 *
 * Collective over the tensor-parallel group.
 * @param params (unit_size, 1), f32
 * @param x      taken: it becomes saved->x; no tensor for unit 0
 * @param saved  filled; the caller's until unit_backward() or saved_free()
 * @return y, the caller's; no tensor for the last unit, which stores b->loss
 */
struct tensor unit_forward(const struct model *m, int u, struct tensor params, struct tensor x,
                           const struct batch *b, struct saved *saved);

/**
 * @brief Backward of one unit.
 *
 * Collective over the tensor-parallel group.
 * @param saved taken, all of it
 * @param dy    taken; no tensor for the last unit
 * @param grads (unit_size, 1), f32: every element is stored, padding as 0
 * @return dx, the caller's; no tensor for unit 0
 */
struct tensor unit_backward(const struct model *m, int u, struct tensor params, struct saved *saved,
                            struct tensor dy, const struct batch *b, struct tensor grads);

/** @brief After the forward of the last unit: the logits (rows, classes), a view into saved. */
struct tensor unit_logits(const struct model *m, const struct saved *saved);

// ---- common/model.c: the same for both models --------------------------------------------------

/** @brief Lays the parameters out one after the other, and fills what follows from rows, cols and
 * split: offset, place, shape. Local. */
void params_layout(struct param *params, int count);

/** @brief The parameter p of a unit as a view of the unit's flat buffer. Local. */
struct tensor param_view(struct tensor flat, const struct param *p);

/** @brief Stores 0 between and after the parameters of a unit's flat buffer. Local. */
void padding_zero(const struct model *m, int u, struct tensor flat);

/** @brief Elements of a parameter's whole. */
size_t param_whole_count(const struct param *p);

/** @brief Parameters of the whole model, without padding. Local. */
size_t model_parameters(const struct model *m);

/** @brief Frees all tensors of saved. Local. */
void saved_free(struct saved *s);

/** @brief A hash of a tensor's bytes and of @p hash, to chain several. Local; waits for the ops
 * before.
 */
uint64_t tensor_hash(struct tensor t, uint64_t hash);

/** @brief Loads samples onto the device, as a batch without scale and loss. Local. */
struct batch batch_load(struct data *d, enum data_part part, uint64_t first_sample, size_t samples);

/** @brief One sample of tokens whose targets do not count, to see what a model predicts. Local.
 * @param tokens (count) */
struct batch batch_prompt(const int32_t *tokens, size_t count);

/** @brief Frees the batch's input and targets. Local. */
void batch_free(struct batch *b);

#ifdef __cplusplus
}
#endif
#endif
