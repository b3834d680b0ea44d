// Drives a build of llama.cpp by requests on standard input, for engine/compare/llama_process.py.
//
// It is compiled against the headers of the build under test and linked to its library, so that no
// structure of llama.cpp is described anywhere else. Fields and functions that a version may lack
// are looked for, when it is compiled or when it runs.
//
// A frame is its length (u64) and values; a value is 'i' and an int64, or 'b', a length (u64) and
// bytes, all little endian. A request begins with the name of a command. A reply begins with 0, or
// with 1 and the kind of error ("model", "full", "library", "option") and a message.

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>
#ifdef __linux__
#include <sys/prctl.h>
#endif

static constexpr uint64_t max_frame = 1ull << 34;
static constexpr size_t   piece     = 1u << 20;
static constexpr size_t   max_node  = 1u << 28;  // bytes of a tensor that is read
static constexpr int64_t  version   = 1;

struct error {
    const char * kind;
    std::string  message;
};

// ---- frames ------------------------------------------------------------------------------------

struct request {
    std::vector<uint8_t> data;
    size_t               at = 0;

    const uint8_t * take(uint64_t n) {
        if (n > data.size() - at) {
            throw error{ "option", "a request ends in the middle of a value" };
        }
        at += n;
        return data.data() + at - n;
    }
    void tag(char wanted) {
        if (*take(1) != (uint8_t) wanted) {
            throw error{ "option", "a request has a value of another kind" };
        }
    }
    int64_t integer(int64_t least = INT32_MIN, int64_t most = INT32_MAX) {
        tag('i');
        int64_t value;
        memcpy(&value, take(8), 8);
        if (value < least || value > most) {
            throw error{ "option", "a request has a number out of range: " + std::to_string(value) };
        }
        return value;
    }
    template <class T> std::vector<T> array() {
        tag('b');
        uint64_t n;
        memcpy(&n, take(8), 8);
        const uint8_t * from = take(n);
        if (n % sizeof(T)) {
            throw error{ "option", "a request has an array of another type" };
        }
        std::vector<T> found(n / sizeof(T));
        if (n) {
            memcpy(found.data(), from, n);
        }
        return found;
    }
    std::string text() {
        const auto bytes = array<char>();
        return std::string(bytes.begin(), bytes.end());
    }
};

struct reply {
    std::string data;

    reply & integer(int64_t value) {
        data += 'i';
        data.append((const char *) &value, 8);
        return *this;
    }
    reply & bytes(const void * from, uint64_t n) {
        data += 'b';
        data.append((const char *) &n, 8);
        data.append((const char *) from, n);
        return *this;
    }
    reply & text(const std::string & value) { return bytes(value.data(), value.size()); }
};

static bool read_all(uint8_t * to, size_t n) {
    for (size_t got = 0; got < n;) {
        const ssize_t some = read(0, to + got, n - got);
        if (some <= 0) {
            return false;
        }
        got += some;
    }
    return true;
}

static bool read_frame(request & into) {
    uint64_t n;
    if (!read_all((uint8_t *) &n, 8) || n > max_frame) {
        return false;
    }
    into.at = 0;
    into.data.clear();
    while (n) {  // as it arrives: a false length takes no memory
        const size_t some = std::min<uint64_t>(n, piece), had = into.data.size();
        into.data.resize(had + some);
        if (!read_all(into.data.data() + had, some)) {
            return false;
        }
        n -= some;
    }
    return true;
}

static bool write_all(int fd, const char * from, size_t n) {
    while (n) {
        const ssize_t some = write(fd, from, n);
        if (some <= 0) {
            return false;
        }
        from += some;
        n -= some;
    }
    return true;
}

// ---- what versions differ in -------------------------------------------------------------------

// set_FIELD(params, value): whether the structure has that field
#define FIELD(name)                                                                                \
    template <class P, class V>                                                                    \
    static auto set_##name(P & params, V value, int)                                               \
        -> decltype(params.name = static_cast<decltype(params.name)>(value), true) {               \
        params.name = static_cast<decltype(params.name)>(value);                                   \
        return true;                                                                               \
    }                                                                                              \
    template <class P, class V> static bool set_##name(P &, V, long) { return false; }

FIELD(n_rs_seq)
FIELD(flash_attn_type)
FIELD(flash_attn)
FIELD(kv_unified)
FIELD(swa_full)
FIELD(ctx_type)
FIELD(ctx_other)
FIELD(load_mtp)
FIELD(devices)

template <class F> static F function(const char * name) {
    return (F) dlsym(RTLD_DEFAULT, name);
}

// The rows that an MTP block reads, which are of a staging interface in C++
static void (*set_nextn)(llama_context *, bool, bool) =
    function<void (*)(llama_context *, bool, bool)>("_Z26llama_set_embeddings_nextnP13llama_contextbb");
static float * (*get_nextn)(llama_context *) =
    function<float * (*) (llama_context *)>("_Z26llama_get_embeddings_nextnP13llama_context");

static void must(bool known, const char * what) {
    if (!known) {
        throw error{ "option", std::string("this build of llama.cpp has no ") + what };
    }
}

// Bytes that a function returning a structure writes, 0 where the calling convention hides it.
static size_t n_written(void * address) {
#if defined(__x86_64__) && !defined(_WIN32)
    constexpr size_t     room = 1 << 14;
    std::vector<uint8_t> seen[2];
    for (int i = 0; i < 2; i++) {
        seen[i].assign(room, i ? 0x5a : 0xa5);
        ((void (*)(void *)) address)(seen[i].data());
    }
    size_t n = room;
    while (n && seen[0][n - 1] != seen[1][n - 1]) {
        n--;
    }
    return n;
#else
    (void) address;
    return 0;
#endif
}

static void check_size(const char * name, size_t expected, void * address) {
    const size_t found = n_written(address);
    if (found && (found > expected || found + 8 <= expected)) {
        throw error{ "library", std::string("its headers are of another version than its library: ") + name +
                                    " has " + std::to_string(expected) + " bytes and not " + std::to_string(found) };
    }
}

// ---- state -------------------------------------------------------------------------------------

struct node {  // as engine/compare/llama_process.py reads it
    char    name[64];
    char    op[32];
    int32_t type;
    int32_t stride;  // the reply has every stride-th value
    int64_t ne[4];
    int64_t n_values;  // in the reply
    double  norm;
    double  sum;
};
static_assert(sizeof(node) == 160, "a node is packed");

struct trace {
    bool               on    = false;
    size_t             limit = 0;
    std::vector<node>  nodes;
    std::vector<float> values;
};

struct opened {
    llama_context * context;
    llama_batch     batch;
    int32_t         width;
    int             model;
    trace *         traced;
};

static std::vector<llama_model *> models;
static std::vector<opened>        contexts;
static std::string                last_error;

static void hear(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR && text[0] && text[0] != '\n') {
        last_error = text;
        while (!last_error.empty() && strchr(" \n.", last_error.back())) {
            last_error.pop_back();
        }
    }
}

static std::string why() {
    return last_error.empty() ? "no reason given" : last_error;
}

static opened & context_of(request & in) {
    opened & found = contexts[in.integer(0, (int64_t) contexts.size() - 1)];
    if (!found.context) {
        throw error{ "option", "this context was closed" };
    }
    return found;
}

static int32_t sequence_of(request & in, const opened & one) {
    return (int32_t) in.integer(-1, (int64_t) llama_n_seq_max(one.context) - 1);
}

static int32_t n_vocab(const opened & one) {
    return llama_vocab_n_tokens(llama_model_get_vocab(models[one.model]));
}

// ---- trace of a graph --------------------------------------------------------------------------

static float element(ggml_type type, const uint8_t * from) {
    switch (type) {
        case GGML_TYPE_F32: { float v; memcpy(&v, from, 4); return v; }
        case GGML_TYPE_F16: { ggml_fp16_t v; memcpy(&v, from, 2); return ggml_fp16_to_fp32(v); }
        case GGML_TYPE_BF16: { ggml_bf16_t v; memcpy(&v, from, 2); return ggml_bf16_to_fp32(v); }
        case GGML_TYPE_I8: return (float) *(const int8_t *) from;
        case GGML_TYPE_I16: { int16_t v; memcpy(&v, from, 2); return v; }
        case GGML_TYPE_I32: { int32_t v; memcpy(&v, from, 4); return (float) v; }
        case GGML_TYPE_I64: { int64_t v; memcpy(&v, from, 8); return (float) v; }
        default: return NAN;
    }
}

// The values of a tensor in order, whatever its strides. False: of a size or type that is not read.
static bool values_of(const ggml_tensor * t, std::vector<float> & out) {
    const size_t n_bytes = ggml_nbytes(t);
    const auto * traits  = ggml_get_type_traits(t->type);
    const bool   blocks  = ggml_blck_size(t->type) > 1;
    if (!t->buffer && !(t->view_src && t->view_src->buffer)) {
        return false;
    }
    if (n_bytes > max_node || (blocks && !traits->to_float)) {
        return false;
    }
    std::vector<uint8_t> raw(n_bytes);
    ggml_backend_tensor_get(t, raw.data(), 0, n_bytes);
    out.resize(ggml_nelements(t));
    float * to = out.data();
    for (int64_t i3 = 0; i3 < t->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < t->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                const uint8_t * row = raw.data() + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
                if (blocks) {
                    traits->to_float(row, to, t->ne[0]);
                    to += t->ne[0];
                    continue;
                }
                for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
                    *to++ = element(t->type, row + i0 * t->nb[0]);
                }
            }
        }
    }
    return true;
}

static bool observe(ggml_tensor * t, bool ask, void * data) {
    trace & into = *(trace *) data;
    if (ask || !into.on) {
        return into.on;
    }
    static std::vector<float> found;
    node                      one{};
    snprintf(one.name, sizeof one.name, "%s", ggml_get_name(t));
    snprintf(one.op, sizeof one.op, "%s", ggml_op_desc(t));
    one.type = t->type;
    std::copy(t->ne, t->ne + 4, one.ne);
    if (values_of(t, found) && !found.empty()) {
        double squares = 0;
        for (const float v : found) {
            squares += (double) v * v;
            one.sum += v;
        }
        one.norm   = std::sqrt(squares);
        one.stride = (int32_t) std::max<size_t>(1, (found.size() + into.limit - 1) / into.limit);
        for (size_t i = 0; i < found.size(); i += one.stride) {
            into.values.push_back(found[i]);
            one.n_values++;
        }
    }
    into.nodes.push_back(one);
    return true;
}

// ---- commands ----------------------------------------------------------------------------------

static void build_facts(request &, reply & out) {
    const auto text = [&](const char * name) {
        const auto ask = function<const char * (*) ()>(name);
        return std::string(ask ? ask() : "");
    };
    std::string devices;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const auto device = ggml_backend_dev_get(i);
        devices += std::string(i ? "\n" : "") + ggml_backend_dev_name(device) + "\t" +
                   ggml_backend_dev_description(device);
    }
    out.integer(version).text(text("llama_version")).text(text("ggml_commit")).text(llama_print_system_info());
    out.text(devices);
}

// path, layers on a GPU, names of devices separated by commas, whether MTP blocks are loaded
static void open_model(request & in, reply & out) {
    const std::string path = in.text();
    auto              params = llama_model_default_params();
    params.n_gpu_layers      = (int32_t) in.integer();
    std::string names        = in.text();
    static std::vector<ggml_backend_dev_t> devices;
    devices.clear();
    while (!names.empty()) {
        const size_t      end  = names.find(',');
        const std::string name = names.substr(0, end);
        names                  = end == std::string::npos ? "" : names.substr(end + 1);
        const auto device      = ggml_backend_dev_by_name(name.c_str());
        if (!device) {
            std::string known;
            for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
                known += std::string(i ? ", " : "") + ggml_backend_dev_name(ggml_backend_dev_get(i));
            }
            throw error{ "option", "there is no device " + name + " (known: " + known + ")" };
        }
        devices.push_back(device);
    }
    if (!devices.empty()) {
        devices.push_back(nullptr);
        must(set_devices(params, devices.data(), 0), "choice of devices");
    }
    if (in.integer(0, 1)) {
        must(set_load_mtp(params, true, 0), "MTP blocks (load_mtp)");
    }
    last_error.clear();
    llama_model * model = llama_model_load_from_file(path.c_str(), params);
    if (!model) {
        throw error{ "model", why() };
    }
    models.push_back(model);
    out.integer((int64_t) models.size() - 1)
        .integer(llama_vocab_n_tokens(llama_model_get_vocab(model)))
        .integer(llama_model_n_layer(model))
        .integer((int64_t) llama_model_size(model));
}

// model, n_seq_max, n_ctx (of all), n_batch, n_ubatch, n_rs_seq, threads, flash attention (-1 auto,
// 0, 1), types of K and V, unified cells, MTP context, the context that it is of or -1, traced
static void open_context(request & in, reply & out) {
    const int model  = (int) in.integer(0, (int64_t) models.size() - 1);
    auto      params = llama_context_default_params();
    params.n_seq_max = (uint32_t) in.integer(1, 4096);
    params.n_ctx     = (uint32_t) in.integer(1);
    params.n_batch   = (uint32_t) in.integer(1, 1 << 20);
    params.n_ubatch  = (uint32_t) in.integer(1, 1 << 20);
    if (const auto planes = in.integer(0, 4096)) {
        must(set_n_rs_seq(params, planes, 0), "snapshot planes (n_rs_seq)");
    }
    params.n_threads = params.n_threads_batch = (int32_t) in.integer(1, 4096);
    const auto flash = in.integer(-1, 1);
    must(set_flash_attn_type(params, flash, 0) || set_flash_attn(params, flash == 1, 0), "choice of flash attention");
    params.type_k = (ggml_type) in.integer(0, GGML_TYPE_COUNT - 1);
    params.type_v = (ggml_type) in.integer(0, GGML_TYPE_COUNT - 1);
    if (const auto unified = in.integer(0, 1); !set_kv_unified(params, unified == 1, 0)) {
        must(!unified, "unified cells (kv_unified)");
    }
    if (in.integer(0, 1)) {
        must(set_ctx_type(params, 1, 0), "MTP contexts (ctx_type)");
    }
    const auto other = in.integer(-1, (int64_t) contexts.size() - 1);
    if (other >= 0) {
        must(contexts[other].context, "context of that number any more");
        must(set_nextn && get_nextn, "rows for MTP blocks (llama_set_embeddings_nextn)");
        must(set_ctx_other(params, contexts[other].context, 0), "contexts of contexts (ctx_other)");
    }
    auto traced = std::make_unique<trace>();
    if (in.integer(0, 1)) {
        params.cb_eval           = observe;
        params.cb_eval_user_data = traced.get();
    } else {
        traced.reset();
    }
    last_error.clear();
    llama_context * context = llama_init_from_model(models[model], params);
    if (!context) {
        throw error{ "model", why() };
    }
    if (other >= 0) {
        set_nextn(contexts[other].context, true, false);
        set_nextn(context, true, true);
    }
    const auto    planes = function<uint32_t (*)(const llama_context *)>("llama_n_rs_seq");
    const int32_t width  = (int32_t) llama_n_batch(context);
    contexts.push_back({ context, llama_batch_init(width, 0, 1), width, model, traced.release() });
    out.integer((int64_t) contexts.size() - 1).integer(planes ? planes(context) : 0).integer(width);
}

static void give_back(opened & one) {
    if (one.context) {
        llama_batch_free(one.batch);
        llama_free(one.context);
        delete one.traced;
    }
    one.context = nullptr;
}

static void close_context(request & in, reply &) {
    give_back(context_of(in));
}

// context, tokens, positions, sequences (int32), whether each has logits (int8), rows that an MTP
// block reads or none (float), most values of a node that are traced, 0 = no trace: status, logits,
// nodes, values of the nodes
static void decode(request & in, reply & out) {
    opened &   one       = context_of(in);
    const auto tokens    = in.array<int32_t>();
    const auto positions = in.array<int32_t>();
    const auto sequences = in.array<int32_t>();
    const auto outputs   = in.array<int8_t>();
    auto       rows_in   = in.array<float>();
    const auto limit     = in.integer(0);
    const size_t n       = tokens.size();
    if (!rows_in.empty() && rows_in.size() != n * llama_model_n_embd(models[one.model])) {
        throw error{ "option", "rows of another width than the model's" };
    }
    if (!n || n > (size_t) one.width || positions.size() != n || sequences.size() != n || outputs.size() != n) {
        throw error{ "option", "a batch of " + std::to_string(n) + " tokens where " + std::to_string(one.width) +
                                   " fit, or of unequal arrays" };
    }
    if (limit) {
        must(one.traced, "trace in this context, which was opened without");
        *one.traced = { true, (size_t) limit, {}, {} };
    }
    one.batch.n_tokens = (int32_t) n;
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab(one)) {
            throw error{ "option", "token " + std::to_string(tokens[i]) + " is not in the vocabulary" };
        }
        one.batch.token[i]     = tokens[i];
        one.batch.pos[i]       = positions[i];
        one.batch.n_seq_id[i]  = 1;
        one.batch.seq_id[i][0] = sequences[i];
        one.batch.logits[i]    = outputs[i] != 0;
    }
    one.batch.embd       = rows_in.empty() ? nullptr : rows_in.data();
    const int32_t status = llama_decode(one.context, one.batch);
    one.batch.embd       = nullptr;
    out.integer(status);
    std::vector<float> rows;
    for (size_t i = 0; i < n && !status; i++) {
        if (outputs[i]) {
            const float * row = llama_get_logits_ith(one.context, (int32_t) i);
            if (!row) {
                throw error{ "library", "no logits of a token that they were asked for" };
            }
            rows.insert(rows.end(), row, row + n_vocab(one));
        }
    }
    out.bytes(rows.data(), rows.size() * sizeof(float));
    if (limit) {
        trace & found = *one.traced;
        found.on      = false;
        out.bytes(found.nodes.data(), found.nodes.size() * sizeof(node));
        out.bytes(found.values.data(), found.values.size() * sizeof(float));
        found = {};
    }
}

// context, n: the rows of the last n tokens that were decoded, for an MTP block
static void nextn(request & in, reply & out) {
    opened &   one = context_of(in);
    const auto n   = in.integer(1, one.batch.n_tokens);
    must(get_nextn, "rows for MTP blocks (llama_get_embeddings_nextn)");
    const float * rows = get_nextn(one.context);
    if (!rows) {
        throw error{ "option", "no context at the side reads these rows" };
    }
    const size_t width = llama_model_n_embd(models[one.model]);
    out.bytes(rows + (one.batch.n_tokens - n) * width, n * width * sizeof(float));
}

static void seq_rm(request & in, reply & out) {
    opened &   one = context_of(in);
    const auto seq = sequence_of(in, one);
    const auto p0  = (llama_pos) in.integer();
    const auto p1  = (llama_pos) in.integer();
    out.integer(llama_memory_seq_rm(llama_get_memory(one.context), seq, p0, p1));
}

static void seq_cp(request & in, reply &) {
    opened &   one  = context_of(in);
    const auto from = sequence_of(in, one);
    llama_memory_seq_cp(llama_get_memory(one.context), from, sequence_of(in, one), -1, -1);
}

static void seq_keep(request & in, reply &) {
    opened & one = context_of(in);
    llama_memory_seq_keep(llama_get_memory(one.context), sequence_of(in, one));
}

static void seq_add(request & in, reply &) {
    opened &   one = context_of(in);
    const auto seq = sequence_of(in, one);
    const auto p0  = (llama_pos) in.integer();
    const auto p1  = (llama_pos) in.integer();
    llama_memory_seq_add(llama_get_memory(one.context), seq, p0, p1, (llama_pos) in.integer());
}

// first and last position of a sequence, -1 = none
static void positions(request & in, reply & out) {
    opened &   one    = context_of(in);
    const auto seq    = sequence_of(in, one);
    const auto memory = llama_get_memory(one.context);
    out.integer(llama_memory_seq_pos_min(memory, seq)).integer(llama_memory_seq_pos_max(memory, seq));
}

static void save(request & in, reply & out) {
    opened &             one   = context_of(in);
    const auto           seq   = sequence_of(in, one);
    const auto           flags = (uint32_t) in.integer(0, 3);
    std::vector<uint8_t> blob(llama_state_seq_get_size_ext(one.context, seq, flags));
    last_error.clear();
    const size_t n = llama_state_seq_get_data_ext(one.context, blob.data(), blob.size(), seq, flags);
    if (!n || n != blob.size()) {
        throw error{ "library", "saving sequence " + std::to_string(seq) + ": " + why() };
    }
    out.bytes(blob.data(), n);
}

static void load(request & in, reply &) {
    opened &   one   = context_of(in);
    const auto seq   = sequence_of(in, one);
    const auto blob  = in.array<uint8_t>();
    const auto flags = (uint32_t) in.integer(0, 3);
    last_error.clear();
    if (!llama_state_seq_set_data_ext(one.context, blob.data(), blob.size(), seq, flags)) {
        throw error{ "library", "restoring sequence " + std::to_string(seq) + ": " + why() };
    }
}

// A slot file as llama-server writes it: context, sequence, path, tokens
static void save_file(request & in, reply &) {
    opened &   one    = context_of(in);
    const auto seq    = sequence_of(in, one);
    const auto path   = in.text();
    const auto tokens = in.array<int32_t>();
    last_error.clear();
    if (!llama_state_seq_save_file(one.context, path.c_str(), seq, tokens.data(), tokens.size())) {
        throw error{ "library", "saving the slot file of sequence " + std::to_string(seq) + ": " + why() };
    }
}

static void load_file(request & in, reply & out) {
    opened &             one  = context_of(in);
    const auto           seq  = sequence_of(in, one);
    const auto           path = in.text();
    std::vector<int32_t> tokens(llama_n_ctx(one.context));
    size_t               n = 0;
    last_error.clear();
    if (!llama_state_seq_load_file(one.context, path.c_str(), seq, tokens.data(), tokens.size(), &n)) {
        throw error{ "library", "loading the slot file of sequence " + std::to_string(seq) + ": " + why() };
    }
    out.bytes(tokens.data(), std::min(n, tokens.size()) * sizeof(int32_t));
}

static const struct {
    const char * name;
    void (*run)(request &, reply &);
} commands[] = {
    { "build_facts", build_facts },
    { "open_model", open_model },
    { "open_context", open_context },
    { "close_context", close_context },
    { "decode", decode },
    { "nextn", nextn },
    { "seq_rm", seq_rm },
    { "seq_cp", seq_cp },
    { "seq_keep", seq_keep },
    { "seq_add", seq_add },
    { "positions", positions },
    { "save", save },
    { "load", load },
    { "save_file", save_file },
    { "load_file", load_file },
};

static reply answer(request & in) {
    try {
        const std::string name = in.text();
        for (const auto & one : commands) {
            if (name == one.name) {
                reply out;
                out.integer(0);
                one.run(in, out);
                return out;
            }
        }
        throw error{ "option", "this driver knows no command " + name };
    } catch (const error & found) {
        reply out;
        out.integer(1).text(found.kind).text(found.message);
        return out;
    } catch (const std::exception & found) {
        reply out;
        out.integer(1).text("library").text(found.what());
        return out;
    }
}

int main() {
    const int replies = dup(1);
    dup2(2, 1);               // what the library prints is not a reply
    signal(SIGINT, SIG_IGN);  // Ctrl-C is for the parent, which closes
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // also from the middle of a call that never ends
#endif
    llama_log_set(hear, nullptr);
    request in;
    bool    checked = false;
    while (read_frame(in)) {
        reply out;
        try {
            if (!checked) {
                check_size("llama_model_params", sizeof(llama_model_params), (void *) llama_model_default_params);
                check_size("llama_context_params", sizeof(llama_context_params), (void *) llama_context_default_params);
                llama_backend_init();
                if (!ggml_backend_dev_count()) {
                    ggml_backend_load_all();
                }
                checked = true;
            }
            out = answer(in);
        } catch (const error & found) {
            out = {};
            out.integer(1).text(found.kind).text(found.message);
        }
        const uint64_t n = out.data.size();
        if (!write_all(replies, (const char *) &n, 8) || !write_all(replies, out.data.data(), n)) {
            break;
        }
    }
    for (auto & one : contexts) {
        give_back(one);
    }
    for (auto * model : models) {
        llama_model_free(model);
    }
    return 0;
}
