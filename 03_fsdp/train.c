// Chapter 03: fully sharded data parallelism.
//
// What it does. Every rank has a part of the model. A step takes the next `batch` samples, cut into
// a part for each rank, and that into M micro-batches:
//
//     for each micro-batch:   forward through all units     x -> y, saving what backward needs
//                             backward through all units    dy -> dx, and fresh gradients
//                             units are gathered before they run and freed when they have run
//                             grads (+)= fresh gradients    of a part, summed over all ranks
//     norm = |grads|          over the whole model
//     params -= optimizer(grads * min(1, clip / norm))
//
//     memory   params + grads + optimizer state   4, 4 and 8 bytes a parameter (AdamW)
//              divided by n ranks
//              + gathered units                    1 + prefetch of them at most
//              + what forward saves                grows with the samples of a micro-batch
//     sent     3 (n-1)/n of the parameters         by each of n ranks, for each micro-batch
//
// That is --shard parameters; the other levels are in shard.c. All train the model of chapter 02,
// with one micro-batch bit by bit: a reduce-scatter adds what an all-reduce adds.
//
// The lesson is shard.c, and here forward(), accumulate(), backward(), grad_norm(), update() and
// evaluate(). What is left out: ranks that compute less than a whole unit.
//
// Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
// Models", 2020; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
// 2023; those of the optimizers are in common/ops.h. The text to this chapter is docs/03_fsdp.md.
//
// Run:  ./run 03_fsdp/llama -n 2 --steps 600
//       ./run 03_fsdp/mnist -n 2 --epochs 1
//
// The last lines are the peak memory and its parts, and what was sent.
#include "buckets.h"
#include "common/checkpoint.h"
#include "common/comm.h"
#include "common/data.h"
#include "common/device.h"
#include "common/error.h"
#include "common/log.h"
#include "common/model.h"
#include "common/optimizer.h"
#include "common/options.h"
#include "common/sample.h"
#include "common/stop.h"
#include "common/trace.h"
#include "shard.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct config {
    struct options options; // what every chapter has

    const char *ddp; // after, buckets, overlap
    double bucket_mb; // 2^20 bytes

    struct shard_config shard;
};

struct trainer {
    struct config config;
    struct options *o; // &config.options
    struct model *model;
    struct data *data;
    int units;
    int first_unit; // this process runs the units first_unit …
    int last_unit; // … last_unit - 1
    struct tensor *params; // (units) flat buffer of each unit
    struct tensor *grads; // (units) the same layout
    struct tensor *states[OPTIMIZER_STATES_MAX]; // (units) the same layout
    struct piece *pieces; // (piece_count) what this process updates
    size_t piece_count;
    struct saved *saved; // (micro_batches, units)
    struct batch *batches; // (micro_batches)
    struct tensor losses; // (micro_batches, 2) F64: loss sum, right answers
    int64_t steps_per_epoch;
    int64_t steps; // of the whole training
    int64_t step; // done so far
    bool diverged; // a loss or a norm was no number
    struct checkpoint checkpoint;
    struct log *log;

    struct comm world; // all ranks
    struct buckets *buckets;
    struct shard *shard;
};

// ---- set-up ------------------------------------------------------------------------------------

// The flags of this chapter.
static void config_parse(struct trainer *t, int argc, char **argv) {
    struct config *c = &t->config;
    c->options = options_defaults();
    t->o = &c->options;
    t->model = model_create(t->o);
    c->ddp = "overlap";
    c->bucket_mb = 1;
    c->shard.level = "parameters";
    c->shard.replicas = 1;
    c->shard.prefetch = 1;
    const struct arg args[] = {
        {"--ddp", ARG_CHOICE, &c->ddp, .choices = "after|buckets|overlap",
         .group = "Data parallelism", .help = "when gradients are summed over the ranks"},
        {"--bucket-mb", ARG_DOUBLE, &c->bucket_mb, 1e-5, 1 << 20, .unit = "N",
         .help = "size of a bucket of gradients, in 2^20 bytes"},
        {"--shard", ARG_CHOICE, &c->shard.level, .choices = "none|optimizer|gradients|parameters",
         .group = "Sharding", .help = "what is cut, with what stands before it; none: see --ddp"},
        {"--replicas", ARG_INT, &c->shard.replicas, 1, 1 << 20,
         .help = "groups of ranks that each hold a whole model"},
        {"--prefetch", ARG_INT, &c->shard.prefetch, 0, 1 << 20,
         .help = "wraps that are gathered ahead"},
        {"--keep-gathered", ARG_FLAG, &c->shard.keep_gathered,
         .help = "keep parameters gathered from forward to backward"},
        {"--no-sync", ARG_FLAG, &c->shard.no_sync,
         .help = "add up whole gradients over the micro-batches and reduce them once"},
        {"--wrap-params", ARG_INT, &c->shard.wrap_params, 0, 1e15,
         .help = "units are wrapped together until they have N parameters; 0: each is a wrap"},
        {0},
    };
    options_parse(t->o, argc, argv, "Trains on many devices, each with a part of the model.",
                  model_args(t->model), args);
}

// Cuts one buffer into the flat buffers of the units, one after the other.
static struct tensor *flat_alloc(struct trainer *t, enum mem_category category) {
    struct tensor *flat = calloc(t->units, sizeof *flat);
    CHECK(flat != NULL);
    size_t count = shard_elements(t->shard, category);
    struct tensor all = tensor_alloc(count, 1, DTYPE_F32, category);
    ops_zero(all); // states begin with 0, and padding stays 0
    for (int u = t->first_unit; u < t->last_unit; u++) {
        flat[u] = shard_unit(t->shard, all, category, u);
    }
    return flat;
}

static void flat_free(struct trainer *t, struct tensor *flat) {
    struct tensor all = flat[t->first_unit];
    all.rows = shard_elements(t->shard, all.category);
    tensor_free(&all);
    free(flat);
}

static void buffers_init(struct trainer *t) {
    t->params = flat_alloc(t, MEM_PARAMS);
    t->grads = flat_alloc(t, MEM_GRADS);
    for (int k = 0; k < optimizer_states(t->o); k++) {
        t->states[k] = flat_alloc(t, MEM_OPTIMIZER);
    }
}

static void params_init(struct trainer *t) {
    for (int u = t->first_unit; u < t->last_unit; u++) {
        struct tensor whole = tensor_alloc(unit_size(t->model, u), 1, DTYPE_F32, MEM_COMM);
        unit_init(t->model, u, whole);
        struct range held = shard_range(t->shard, u, MEM_PARAMS);
        ops_copy(t->params[u], tensor_view(whole, held.begin, held.end - held.begin, 1));
        tensor_free(&whole);
    }
}

// Where a parameter lies in its unit.
static struct range param_range(const struct param *p) {
    return (struct range){p->offset, p->offset + p->rows * p->cols};
}

// Lists what this process updates: the only thing that norm, clipping and optimizer see.
static void pieces_init(struct trainer *t) {
    struct param params[UNIT_PARAMS_MAX];
    t->pieces = calloc(t->units * UNIT_PARAMS_MAX, sizeof *t->pieces);
    CHECK(t->pieces != NULL);
    for (int u = t->first_unit; u < t->last_unit; u++) {
        int count = unit_params(t->model, u, params);
        struct range mine = shard_range(t->shard, u, MEM_OPTIMIZER);
        for (int i = 0; i < count; i++) {
            struct range part = range_meet(param_range(&params[i]), mine);
            if (part.begin == part.end) {
                continue; // another rank's
            }
            struct piece *p = &t->pieces[t->piece_count++];
            p->param = shard_view(t->shard, t->params, MEM_PARAMS, u, part);
            p->grad = shard_view(t->shard, t->grads, MEM_GRADS, u, part);
            for (int k = 0; k < optimizer_states(t->o); k++) {
                p->state[k] = shard_view(t->shard, t->states[k], MEM_OPTIMIZER, u, part);
            }
            p->decay = params[i].decay;
        }
    }
}

static void steps_init(struct trainer *t) {
    int64_t samples = data_samples(t->data, DATA_TRAIN);
    t->steps_per_epoch = (samples + t->o->batch - 1) / t->o->batch;
    t->steps = t->o->epochs > 0 ? t->o->epochs * t->steps_per_epoch : t->o->steps;
}

// The buffers that hold these values.
static struct tensor *flat_of(struct trainer *t, enum values what) {
    return what >= VALUES_STATE  ? t->states[what - VALUES_STATE]
           : what == VALUES_GRAD ? t->grads
                                 : t->params;
}

// What this process holds of a parameter's values, and where in the parameter that begins.
static struct tensor held(void *trainer, enum values what, int u, int i, size_t *first) {
    struct trainer *t = trainer;
    struct param params[UNIT_PARAMS_MAX];
    unit_params(t->model, u, params);
    struct tensor *flat = flat_of(t, what);
    enum mem_category cut = what == VALUES_UPDATED ? MEM_OPTIMIZER : flat[u].category;
    struct range all = param_range(&params[i]);
    struct range part = range_meet(all, shard_range(t->shard, u, cut));
    *first = part.begin - all.begin;
    return shard_view(t->shard, flat, flat[u].category, u, part);
}

// The whole of a parameter's values, for writing a file.
static void collect(void *trainer, enum values what, int u, int i, float *whole) {
    struct trainer *t = trainer;
    struct param params[UNIT_PARAMS_MAX];
    unit_params(t->model, u, params);
    struct tensor *flat = flat_of(t, what);
    shard_collect(t->shard, flat, flat[u].category, u, param_range(&params[i]), whole);
}

// The step after which this run ends.
static int64_t run_end(const struct trainer *t) {
    int64_t end = t->steps > t->step ? t->steps : t->step;
    bool stops = t->o->stop_after >= 0 && t->step + t->o->stop_after < end;
    return stops ? t->step + t->o->stop_after : end;
}

static void log_init(struct trainer *t) {
    t->log = log_open((struct log_config){
        .quiet = !t->checkpoint.writer,
        .json = t->o->log,
        .memory = t->o->memory,
        .item = model_item(t->model),
        .parameters = model_parameters(t->model),
        .begin = t->step,
        .end = run_end(t),
        .print_every = t->o->print_every,
    });
}

// A hash of the parameters that this rank updates.
static uint64_t params_hash(struct trainer *t) {
    uint64_t hash = 0;
    for (int u = t->first_unit; u < t->last_unit; u++) {
        struct range mine = shard_range(t->shard, u, MEM_OPTIMIZER); // the rest may be on its way
        hash = tensor_hash(shard_view(t->shard, t->params, MEM_PARAMS, u, mine), hash);
    }
    return hash;
}

// Ranks that start with other data or weights would never train one model.
static void ranks_start(struct trainer *t) {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)data_hash(t->data));
    comm_must_match("the hash of the data", text);
    comm_start(t->world, &t->o->comm);
    shard_connect(t->shard, t->world);
}

static void trainer_init(struct trainer *t, int argc, char **argv) {
    t->world = comm_init();
    config_parse(t, argc, argv);
    device_init(t->o->threads, comm_local_size());
    trace_start(t->o->trace);
    model_init(t->model, comm_self());
    t->data = model_data(t->model);
    t->units = model_units(t->model);
    t->first_unit = 0;
    t->last_unit = t->units;
    t->shard = shard_create(&t->config.shard, t->world, t->model);
    buffers_init(t);
    params_init(t);
    pieces_init(t);
    steps_init(t);
    t->saved = mem_table(t->o->micro_batches * t->units, sizeof *t->saved);
    t->batches = mem_table(t->o->micro_batches, sizeof *t->batches);
    t->losses = tensor_alloc(t->o->micro_batches, 2, DTYPE_F64, MEM_ACTIVATIONS);
    t->checkpoint = (struct checkpoint){
        .model = t->model,
        .options = t->o,
        .data = t->data,
        .trainer = t,
        .world = t->world,
        .writer = t->world.rank == 0,
        .collect = collect,
        .held = held,
    };
    checkpoint_check(&t->checkpoint);
    t->step = checkpoint_load(&t->checkpoint);
    log_init(t);
    ranks_start(t);
    t->checkpoint.holds = shard_replicas(t->shard).rank == 0;
    // Whole gradients are summed over all ranks, or not at all: one of the two is without work.
    struct comm whole = shard_cuts(t->shard, MEM_OPTIMIZER) ? comm_self() : t->world;
    t->buckets =
        buckets_create(whole, t->config.ddp, t->config.bucket_mb * (1 << 20), t->grads, t->units);
}

static void trainer_free(struct trainer *t) {
    buckets_free(t->buckets);
    tensor_free(&t->losses);
    free(t->batches);
    free(t->saved);
    free(t->pieces);
    for (int k = optimizer_states(t->o) - 1; k >= 0; k--) {
        flat_free(t, t->states[k]);
    }
    flat_free(t, t->grads);
    flat_free(t, t->params);
    shard_free(t->shard);
    data_close(t->data);
    model_free(t->model);
}

// ---- one step ----------------------------------------------------------------------------------

// Forward of one micro-batch through this process's units: the first takes x, the last returns y.
// There is neither before chapter 05, where units have their neighbours on other ranks.
static struct tensor forward(struct trainer *t, int m, struct tensor x) {
    const struct batch *b = &t->batches[m];
    struct saved *saved = &t->saved[m * t->units];
    for (int u = t->first_unit; u < t->last_unit; u++) {
        struct tensor params = shard_gather(t->shard, t->params, u, +1);
        trace_begin("forward", u);
        x = unit_forward(t->model, u, params, x, b, &saved[u]);
        trace_end();
        shard_release(t->shard, u, +1);
        if (!b->train && u < t->units - 1) {
            saved_free(&saved[u]); // no backward will come
        }
    }
    return x;
}

// Takes the fresh gradients of unit u: the first micro-batch's are stored, the others added.
static void accumulate(struct trainer *t, int m, int u, struct tensor fresh) {
    if (shard_reduces_fresh(t->shard)) {
        shard_reduce(t->shard, t->grads, u, m == 0, m == t->o->micro_batches - 1);
        return;
    }
    if (m == 0) {
        ops_copy(t->grads[u], fresh);
    } else {
        ops_add(t->grads[u], fresh);
    }
    tensor_free(&fresh);
    if (m == t->o->micro_batches - 1) {
        buckets_ready(t->buckets, u);
        shard_reduce_whole(t->shard, t->grads, u);
    }
}

// Backward of one micro-batch through this process's units, with dy and dx as x and y above.
static struct tensor backward(struct trainer *t, int m, struct tensor dy) {
    const struct batch *b = &t->batches[m];
    struct saved *saved = &t->saved[m * t->units];
    for (int u = t->last_unit - 1; u >= t->first_unit; u--) {
        struct tensor params = shard_gather(t->shard, t->params, u, -1);
        struct tensor fresh = shard_fresh(t->shard, u);
        trace_begin("backward", u);
        dy = unit_backward(t->model, u, params, &saved[u], dy, b, fresh);
        if (b->samples == 0) {
            ops_fill(fresh, -0.0f); // of no samples: x + -0 is x, bit by bit
        }
        shard_release(t->shard, u, -1);
        accumulate(t, m, u, fresh);
        trace_end();
    }
    return dy;
}

// Samples are visited by epoch, so the last step of an epoch may have fewer.
static uint64_t step_first_sample(const struct trainer *t, int64_t step) {
    uint64_t epoch = step / t->steps_per_epoch;
    uint64_t samples = data_samples(t->data, DATA_TRAIN);
    return epoch * samples + (uint64_t)(step % t->steps_per_epoch) * t->o->batch;
}

static size_t step_samples(const struct trainer *t, int64_t step) {
    return step_first_sample(t, step + 1) - step_first_sample(t, step);
}

static size_t step_targets(const struct trainer *t, int64_t step) {
    return data_targets(t->data, DATA_TRAIN, 0, step_samples(t, step));
}

// The samples of a global batch are cut into parts whose sizes differ by at most one.
static size_t part_begin(size_t samples, int part, int parts) {
    return samples * part / parts;
}

// Samples begin … end - 1 of the step are this process's part, and that is cut into micro-batches.
// As part of DATA_TRAIN they have `train` set.
static void batches_load(struct trainer *t, int64_t step) {
    uint64_t start = step_first_sample(t, step);
    size_t begin = part_begin(step_samples(t, step), t->world.rank, t->world.size);
    size_t end = part_begin(step_samples(t, step), t->world.rank + 1, t->world.size);
    int parts = t->o->micro_batches;
    for (int m = 0; m < parts; m++) {
        size_t from = begin + part_begin(end - begin, m, parts);
        size_t to = begin + part_begin(end - begin, m + 1, parts);
        t->batches[m] = batch_load(t->data, DATA_TRAIN, start + from, to - from);
        t->batches[m].scale = 1.0f / step_targets(t, step);
        t->batches[m].loss = tensor_view(t->losses, m * 2, 1, 2);
    }
}

// Sums of the micro-batches, added in order; then those of the ranks.
static double loss_total(struct trainer *t, int64_t step) {
    double *losses = malloc(tensor_count(t->losses) * sizeof *losses);
    CHECK(losses != NULL);
    device_download(losses, t->losses);
    double sum = losses[0];
    for (int m = 1; m < t->o->micro_batches; m++) {
        sum += losses[2 * m];
    }
    free(losses);
    comm_sum_f64(t->world, &sum, 1);
    return sum / step_targets(t, step);
}

// Forward and backward of the whole step; returns the loss.
static double forward_backward(struct trainer *t, int64_t step) {
    batches_load(t, step);
    for (int m = 0; m < t->o->micro_batches; m++) {
        forward(t, m, (struct tensor){0});
        backward(t, m, (struct tensor){0});
    }
    for (int m = 0; m < t->o->micro_batches; m++) {
        batch_free(&t->batches[m]);
    }
    buckets_wait(t->buckets);
    shard_reduce_wait(t->shard, t->grads);
    return loss_total(t, step);
}

static double grad_norm(struct trainer *t) {
    uint32_t max_bits = norm_max(t->pieces, t->piece_count);
    comm_max_u32(shard_group(t->shard), &max_bits);
    unsigned __int128 squares = norm_squares(t->pieces, t->piece_count, max_bits);
    comm_sum_u128(shard_group(t->shard), &squares);
    return norm_root(squares, max_bits);
}

static void update(struct trainer *t, double norm, double lr) {
    double scale = clip_scale(norm, t->o->clip);
    optimizer_step(t->o, t->pieces, t->piece_count, lr, scale, t->step);
    shard_params_changed(t->shard, t->params);
}

// ---- evaluation and text -----------------------------------------------------------------------

// Whether to end early: after a loss that is no number, or a signal such as Ctrl-C. All ranks must
// know, or some would go on alone.
static bool stopping(struct trainer *t) {
    uint32_t stop = t->diverged || stop_requested();
    comm_max_u32(t->world, &stop);
    return stop > 0;
}

// Loss sum and right answers of this rank's validation batches, every n-th, in sums[2*i] and
// sums[2*i + 1].
static void evaluate_batches(struct trainer *t, double *sums, size_t batches) {
    size_t samples = data_samples(t->data, DATA_VALIDATION);
    size_t size = t->o->eval_batch;
    size_t rounds = (batches + t->world.size - 1) / t->world.size;
    for (size_t k = 0; k < rounds && !stopping(t); k++) {
        log_progress(t->log, "evaluating", k, rounds);
        size_t i = k * t->world.size + t->world.rank; // none is left for some ranks in the end
        size_t from = i < batches ? i * size : samples;
        size_t count = samples - from < size ? samples - from : size;
        t->batches[0] = batch_load(t->data, DATA_VALIDATION, from, count);
        t->batches[0].loss = tensor_view(t->losses, 0, 1, 2);
        forward(t, 0, (struct tensor){0});
        device_download(&sums[2 * i], t->batches[0].loss);
        saved_free(&t->saved[t->units - 1]);
        batch_free(&t->batches[0]);
    }
}

// Loss and accuracy over all validation targets, added up batch by batch; neither after Ctrl-C.
static void evaluate(struct trainer *t, struct log_step *s) {
    size_t samples = data_samples(t->data, DATA_VALIDATION);
    size_t batches = (samples + t->o->eval_batch - 1) / t->o->eval_batch;
    double *sums = calloc(2 * (batches + t->world.size), sizeof *sums); // empty ones, too
    CHECK(sums != NULL);
    evaluate_batches(t, sums, batches);
    comm_sum_f64(t->world, sums, 2 * batches); // a batch has one rank's numbers and zeros
    double loss = 0;
    double right = 0;
    for (size_t i = 0; i < batches; i++) {
        loss += sums[2 * i];
        right += sums[2 * i + 1];
    }
    free(sums);
    double targets = data_targets(t->data, DATA_VALIDATION, 0, samples);
    s->evaluated = !stopping(t);
    s->val_loss = loss / targets;
    s->accuracy = right / targets;
}

// The logits of the first validation sample, for comparison with other people's code.
static bool write_logits(struct trainer *t) {
    const char *path = t->checkpoint.writer ? t->o->logits : NULL;
    struct saved *last = &t->saved[t->units - 1];
    t->batches[0] = batch_load(t->data, DATA_VALIDATION, 0, 1);
    t->batches[0].loss = tensor_view(t->losses, 0, 1, 2);
    forward(t, 0, (struct tensor){0});
    bool written = logits_write(path, t->batches[0].input, unit_logits(t->model, last));
    saved_free(last);
    batch_free(&t->batches[0]);
    return written;
}

// Text by the trained model: each byte is drawn from what the model predicts after those before.
static void sample(struct trainer *t) {
    size_t T = data_input_cols(t->data);
    size_t length = 1;
    int32_t *text = calloc(T + t->o->sample, sizeof *text);
    CHECK(text != NULL);
    text[0] = data_prompt(t->data);
    for (int64_t i = 0; i < t->o->sample; i++) {
        log_progress(t->log, "writing", i, t->o->sample);
        size_t from = length > T ? length - T : 0;
        t->batches[0] = batch_prompt(text + from, T);
        t->batches[0].loss = tensor_view(t->losses, 0, 1, 2);
        forward(t, 0, (struct tensor){0});
        struct saved *last = &t->saved[t->units - 1];
        text[length] = logits_draw(unit_logits(t->model, last), length - from - 1, t->o, i);
        length++;
        saved_free(last);
        batch_free(&t->batches[0]);
    }
    log_text(t->log, text, length);
    free(text);
}

// ---- training ----------------------------------------------------------------------------------

// One optimizer step: forward and backward of all micro-batches, clipping, update.
static struct log_step train_step(struct trainer *t, bool first) {
    struct log_step s = {
        .step = t->step + 1,
        .lr = learning_rate(t->o, t->step, t->steps, t->steps_per_epoch),
        .items = step_targets(t, t->step),
        .samples = step_samples(t, t->step),
    };
    log_step_begin(&s);
    s.loss = forward_backward(t, t->step);
    trace_begin("norm", -1);
    s.grad_norm = grad_norm(t);
    trace_end();
    if (first) {
        dump_values(&t->checkpoint, "grads", VALUES_GRAD);
    }
    trace_begin("optimizer", -1);
    update(t, s.grad_norm, s.lr);
    device_sync();
    trace_end();
    log_step_end(&s);
    return s;
}

static void report_header(struct trainer *t) {
    char model[200];
    model_describe(t->model, model, sizeof model);
    char sharding[200];
    shard_describe(t->shard, sharding, sizeof sharding);
    int64_t ranks = t->world.size;
    int64_t batch = step_samples(t, 0); // --batch, or all samples
    int64_t part = (batch + ranks - 1) / ranks;
    int64_t largest = (part + t->o->micro_batches - 1) / t->o->micro_batches;
    log_line(t->log, "chapter", "03_fsdp, %s", model_name(t->model));
    log_line(t->log, "ranks", "%ld, on this machine %d", (long)ranks, comm_local_size());
    log_line(t->log, "device", "%s", device_name());
    log_line(t->log, "model", "%s", model);
    log_line(t->log, "parameters", "%zu in f32, %d units", model_parameters(t->model), t->units);
    log_line(t->log, "data", "%s", data_path(t->data));
    log_line(t->log, "", "%s", data_description(t->data));
    log_line(t->log, "sharding", "%s", sharding);
    log_line(t->log, "batch", "%ld global, at most %ld per rank, %ld per micro-batch", (long)batch,
             (long)part, (long)largest);
    log_line(t->log, "training", "%ld steps, %ld an epoch, %s, lr %g %s", (long)t->steps,
             (long)t->steps_per_epoch, t->o->optimizer, t->o->lr, t->o->schedule);
    checkpoint_report(&t->checkpoint, t->log, t->step, t->steps);
}

// Ends the job if a rank's weights are not those of rank 0.
static void replicas_check(struct trainer *t) {
    uint64_t mine = params_hash(t);
    uint64_t first = mine;
    comm_broadcast_host(shard_replicas(t->shard), &first, sizeof first, 0);
    if (mine != first) {
        error_fatal(__FILE__, __LINE__, "after step %ld the weights differ from a replica's",
                    (long)t->step);
    }
}

static bool eval_due(const struct trainer *t, int64_t end) {
    int64_t every = t->o->eval_every < 0 ? t->steps_per_epoch : t->o->eval_every;
    return t->step == end || (every > 0 && t->step % every == 0);
}

static bool save_due(const struct trainer *t, int64_t end) {
    int64_t every = t->o->save_every;
    return every > 0 && t->step % every == 0 && t->step < end && !t->diverged;
}

// Trains to the end of this run; false if it diverged or what it leaves could not be written.
static bool train(struct trainer *t) {
    int64_t begin = t->step;
    int64_t end = run_end(t);
    while (t->step < end && !stopping(t)) {
        struct log_step s = train_step(t, t->step == begin);
        t->step++;
        if (t->o->comm.check) {
            replicas_check(t);
        }
        if (eval_due(t, end)) {
            evaluate(t, &s);
        }
        dump_step(&t->checkpoint, s.step, s.loss, s.grad_norm);
        t->diverged = !log_report(t->log, &s);
        if (save_due(t, end)) {
            checkpoint_save(&t->checkpoint, t->step, NULL);
        }
    }
    replicas_check(t);
    if (begin >= end) {
        struct log_step s = {
            .step = t->step,
        };
        evaluate(t, &s);
        t->diverged = !log_evaluation(t->log, &s);
    }
    if (stopping(t)) {
        log_line(t->log, "stopped", "after step %ld, %s", (long)t->step,
                 t->diverged ? "since it diverged" : "by a signal");
    }
    bool dumped = dump_values(&t->checkpoint, "final", VALUES_PARAM);
    return !t->diverged && checkpoint_save(&t->checkpoint, t->step, t->log) && dumped;
}

int main(int argc, char **argv) {
    struct trainer t = {0};
    stop_init();
    trainer_init(&t, argc, argv);
    report_header(&t);
    bool good = train(&t);
    if (t.o->sample > 0 && !stopping(&t)) {
        sample(&t);
    }
    if (t.o->logits != NULL && !stopping(&t)) {
        good = write_logits(&t) && good;
    }
    struct mem_stats mem = mem_stats();
    log_summary(t.log, &mem);
    good = trace_finish(t.world) && good;
    good = log_close(t.log) && good;
    trainer_free(&t);
    good = comm_finish() && good;
    int code = stop_exit_code();
    return code != 0 ? code : good ? 0 : 1;
}
