// Chapter 01: training on one device.
//
// What it does. Every step takes the next `batch` samples, cut into M micro-batches:
//
//     for each micro-batch:   forward through all units     x -> y, saving what backward needs
//                             backward through all units    dy -> dx, and fresh gradients
//                             grads (+)= fresh gradients
//     norm = |grads|          over the whole model
//     params -= optimizer(grads * min(1, clip / norm))
//
//     memory   params + grads + optimizer state   4, 4 and 8 bytes a parameter (AdamW)
//              + what forward saves                grows with the samples of a micro-batch
//
// The loss is one sum over the targets of all micro-batches, divided by their number in the whole
// batch, never a mean of means; so M changes memory and time but not the model. The next chapters
// keep this promise on many devices.
//
// The lesson is batches_load(), forward(), backward(), accumulate(), forward_backward(), update()
// and train_step(); the rest prepares and reports. What is left out: everything with more than one
// device.
//
// Sources: Rumelhart, Hinton & Williams, "Learning representations by back-propagating errors",
// 1986; those of the optimizers are in common/ops.h. The text to this chapter is
// docs/01_single_gpu.md.
//
// Run:  ./run 01_single_gpu/llama --steps 600
//       ./run 01_single_gpu/mnist --epochs 1
//
// The last lines are the peak memory and its parts.
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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct config {
    struct options options; // what every chapter has
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
};

// ---- set-up ------------------------------------------------------------------------------------

// The flags of this chapter.
static void config_parse(struct trainer *t, int argc, char **argv) {
    struct config *c = &t->config;
    c->options = options_defaults();
    t->o = &c->options;
    t->model = model_create(t->o);
    const struct arg args[] = {
        {0},
    };
    options_parse(t->o, argc, argv, "Trains on one device.", model_args(t->model), args);
}

// Cuts one buffer into the flat buffers of the units, one after the other.
static struct tensor *flat_alloc(struct trainer *t, enum mem_category category) {
    struct tensor *flat = calloc(t->units, sizeof *flat);
    CHECK(flat != NULL);
    size_t count = 0;
    for (int u = t->first_unit; u < t->last_unit; u++) {
        count += unit_size(t->model, u);
    }
    struct tensor all = tensor_alloc(count, 1, DTYPE_F32, category);
    ops_zero(all); // states begin with 0, and padding stays 0
    size_t offset = 0;
    for (int u = t->first_unit; u < t->last_unit; u++) {
        flat[u] = tensor_view(all, offset, unit_size(t->model, u), 1);
        offset += flat[u].rows;
    }
    return flat;
}

static void flat_free(struct trainer *t, struct tensor *flat) {
    struct tensor all = flat[t->first_unit];
    all.rows = 0;
    for (int u = t->first_unit; u < t->last_unit; u++) {
        all.rows += flat[u].rows;
    }
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
        unit_init(t->model, u, t->params[u]);
    }
}

// Lists what this process updates: the only thing that norm, clipping and optimizer see.
static void pieces_init(struct trainer *t) {
    struct param params[UNIT_PARAMS_MAX];
    t->pieces = calloc(t->units * UNIT_PARAMS_MAX, sizeof *t->pieces);
    CHECK(t->pieces != NULL);
    for (int u = t->first_unit; u < t->last_unit; u++) {
        int count = unit_params(t->model, u, params);
        for (int i = 0; i < count; i++) {
            struct piece *p = &t->pieces[t->piece_count++];
            p->param = param_view(t->params[u], &params[i]);
            p->grad = param_view(t->grads[u], &params[i]);
            for (int k = 0; k < optimizer_states(t->o); k++) {
                p->state[k] = param_view(t->states[k][u], &params[i]);
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
    *first = 0;
    return param_view(flat[u], &params[i]);
}

// The whole of a parameter's values, for writing a file.
static void collect(void *trainer, enum values what, int u, int i, float *whole) {
    size_t first;
    device_download(whole, held(trainer, what, u, i, &first));
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

static void trainer_init(struct trainer *t, int argc, char **argv) {
    config_parse(t, argc, argv);
    device_init(t->o->threads, comm_local_size());
    trace_start(t->o->trace);
    model_init(t->model, comm_self());
    t->data = model_data(t->model);
    t->units = model_units(t->model);
    t->first_unit = 0;
    t->last_unit = t->units;
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
        .writer = true,
        .collect = collect,
        .held = held,
    };
    checkpoint_check(&t->checkpoint);
    t->step = checkpoint_load(&t->checkpoint);
    log_init(t);
}

static void trainer_free(struct trainer *t) {
    tensor_free(&t->losses);
    free(t->batches);
    free(t->saved);
    free(t->pieces);
    for (int k = optimizer_states(t->o) - 1; k >= 0; k--) {
        flat_free(t, t->states[k]);
    }
    flat_free(t, t->grads);
    flat_free(t, t->params);
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
        struct tensor params = t->params[u];
        trace_begin("forward", u);
        x = unit_forward(t->model, u, params, x, b, &saved[u]);
        trace_end();
        if (!b->train && u < t->units - 1) {
            saved_free(&saved[u]); // no backward will come
        }
    }
    return x;
}

// Takes the fresh gradients of unit u: the first micro-batch's are stored, the others added.
static void accumulate(struct trainer *t, int m, int u, struct tensor fresh) {
    if (m == 0) {
        ops_copy(t->grads[u], fresh);
    } else {
        ops_add(t->grads[u], fresh);
    }
    tensor_free(&fresh);
}

// Backward of one micro-batch through this process's units, with dy and dx as x and y above.
static struct tensor backward(struct trainer *t, int m, struct tensor dy) {
    const struct batch *b = &t->batches[m];
    struct saved *saved = &t->saved[m * t->units];
    for (int u = t->last_unit - 1; u >= t->first_unit; u--) {
        struct tensor params = t->params[u];
        struct tensor fresh = tensor_alloc(unit_size(t->model, u), 1, DTYPE_F32, MEM_COMM);
        trace_begin("backward", u);
        dy = unit_backward(t->model, u, params, &saved[u], dy, b, fresh);
        if (b->samples == 0) {
            ops_fill(fresh, -0.0f); // of no samples: x + -0 is x, bit by bit
        }
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
    size_t begin = 0;
    size_t end = step_samples(t, step);
    int parts = t->o->micro_batches;
    for (int m = 0; m < parts; m++) {
        size_t from = begin + part_begin(end - begin, m, parts);
        size_t to = begin + part_begin(end - begin, m + 1, parts);
        t->batches[m] = batch_load(t->data, DATA_TRAIN, start + from, to - from);
        t->batches[m].scale = 1.0f / step_targets(t, step);
        t->batches[m].loss = tensor_view(t->losses, m * 2, 1, 2);
    }
}

// Sums of the micro-batches, added in order.
static double loss_total(struct trainer *t, int64_t step) {
    double *losses = malloc(tensor_count(t->losses) * sizeof *losses);
    CHECK(losses != NULL);
    device_download(losses, t->losses);
    double sum = losses[0];
    for (int m = 1; m < t->o->micro_batches; m++) {
        sum += losses[2 * m];
    }
    free(losses);
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
    return loss_total(t, step);
}

static double grad_norm(struct trainer *t) {
    uint32_t max_bits = norm_max(t->pieces, t->piece_count);
    unsigned __int128 squares = norm_squares(t->pieces, t->piece_count, max_bits);
    return norm_root(squares, max_bits);
}

static void update(struct trainer *t, double norm, double lr) {
    double scale = clip_scale(norm, t->o->clip);
    optimizer_step(t->o, t->pieces, t->piece_count, lr, scale, t->step);
}

// ---- evaluation and text -----------------------------------------------------------------------

// Whether to end early: after a loss that is no number, or a signal such as Ctrl-C.
static bool stopping(struct trainer *t) {
    return t->diverged || stop_requested();
}

// Loss sum and right answers of each validation batch, in sums[2*i] and sums[2*i + 1].
static void evaluate_batches(struct trainer *t, double *sums, size_t batches) {
    size_t samples = data_samples(t->data, DATA_VALIDATION);
    size_t size = t->o->eval_batch;
    for (size_t i = 0; i < batches && !stop_requested(); i++) {
        log_progress(t->log, "evaluating", i, batches);
        size_t count = samples - i * size < size ? samples - i * size : size;
        t->batches[0] = batch_load(t->data, DATA_VALIDATION, i * size, count);
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
    double *sums = calloc(2 * batches, sizeof *sums);
    CHECK(sums != NULL);
    evaluate_batches(t, sums, batches);
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
    int64_t batch = step_samples(t, 0); // --batch, or all samples
    int64_t largest = (batch + t->o->micro_batches - 1) / t->o->micro_batches;
    log_line(t->log, "chapter", "01_single_gpu, %s", model_name(t->model));
    log_line(t->log, "device", "%s", device_name());
    log_line(t->log, "model", "%s", model);
    log_line(t->log, "parameters", "%zu in f32, %d units", model_parameters(t->model), t->units);
    log_line(t->log, "data", "%s", data_path(t->data));
    log_line(t->log, "", "%s", data_description(t->data));
    log_line(t->log, "batch", "%ld global, at most %ld per micro-batch", (long)batch,
             (long)largest);
    log_line(t->log, "training", "%ld steps, %ld an epoch, %s, lr %g %s", (long)t->steps,
             (long)t->steps_per_epoch, t->o->optimizer, t->o->lr, t->o->schedule);
    checkpoint_report(&t->checkpoint, t->log, t->step, t->steps);
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
        if (eval_due(t, end)) {
            evaluate(t, &s);
        }
        dump_step(&t->checkpoint, s.step, s.loss, s.grad_norm);
        t->diverged = !log_report(t->log, &s);
        if (save_due(t, end)) {
            checkpoint_save(&t->checkpoint, t->step, NULL);
        }
    }
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
    good = trace_finish(comm_self()) && good;
    good = log_close(t.log) && good;
    trainer_free(&t);
    int code = stop_exit_code();
    return code != 0 ? code : good ? 0 : 1;
}
