/* `take` for what is common: it stores what `take_reference` (reference.py) stores, bit for bit.

   A call is read with the GIL (attributes, lists), compared and copied without it, and stored at
   its end. Whatever is not plain makes `take` return None, and then the reference takes the call:
   it converts what is unusual, and all errors are its own. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ID, GROUP, TASK, BIRTH, DISCOUNT, CUT, TURNS, NUM_OF_TRAJECTORY };
enum { PROMPT, COMPLETION, LOGPROBS, REWARD, TRUNCATED, START, END, SPANS, FIELDS, REASON, NUM_OF_TURN };
enum { OF_TURNS, OF_CHAINS, OF_TRAJECTORIES, LABELS, OF_SPANS, COUNTS };
enum { WORDS, TOKENS, GENERATED, NUM_TURNS, NUM_CHAINS, NUM_TRAJECTORIES, NUM_SPANS, NUM_COUNTS };
static const char *const TRAJECTORY_NAMES[] = {
    "id", "group", "task_id", "birth_time_ms", "turn_discount", "truncated", "turns"};
static const char *const TURN_NAMES[] = {
    "prompt_ids", "completion_ids", "completion_logprobs", "reward", "truncated", "version_start",
    "version_end", "version_spans", "fields", "stop_reason"};
static PyObject *trajectory_names[NUM_OF_TRAJECTORY], *turn_names[NUM_OF_TURN];
static PyObject *trajectory_type, *turn_type, *array_type; /* set by `bind`, as are the next two lines */
static PyObject *ids_of, *logprobs_of, *versions_of; /* they convert what is unusual */
static PyObject *stop_reasons, *stream_name;

enum { MOST_BREAKS = 4, ALONE = 1 << 16 }; /* bytes from which the GIL is released */

typedef struct { /* numbers of a caller, or converted ones */
    const void *data;
    PyObject *owner; /* array of the caller, if any */
    void *memory; /* ours, if any */
    int32_t size;
    char is_wide; /* 8 bytes a number */
} Piece;

typedef struct { /* `TURN` of stored.py */
    double reward;
    int32_t logprob, chain, begin, size, version_start, version_end;
    uint8_t truncated;
    int8_t stop_reason;
} TurnRow;

typedef struct { int32_t source, size; } ChainRow; /* `CHAIN` of stored.py */
typedef struct {
    Piece prompt, completion, logprobs;
    TurnRow row;
    int32_t num_turns, tip; /* of the trajectory and of the chain with this number, not of this turn */
} Turn;

typedef struct {
    Turn *turns;
    Py_ssize_t num_turns, room;
    Py_ssize_t num_trajectories, num_chains, num_tokens, num_generated, num_bytes;
    int32_t breaks[MOST_BREAKS][3]; /* trajectory, turn of its history, turn */
    int num_breaks;
    float largest; /* log-probability, or 0 */
} Call;

static void free_piece(Piece *piece) {
    Py_XDECREF(piece->owner);
    free(piece->memory);
    memset(piece, 0, sizeof(Piece));
}

static void free_call(Call *call) {
    for (Py_ssize_t i = 0; i < call->num_turns; i++) {
        free_piece(&call->turns[i].prompt);
        free_piece(&call->turns[i].completion);
        free_piece(&call->turns[i].logprobs);
    }
    free(call->turns);
}

/* Functions that return int return 1, or 0 if the call is not plain, with or without an error. */

static int read_int(PyObject *object, int64_t *number) {
    int overflow;
    if (!PyLong_CheckExact(object))
        return 0;
    *number = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

static int read_number(PyObject *object, double *number) {
    if (PyFloat_Check(object))
        *number = PyFloat_AsDouble(object);
    else if (PyLong_CheckExact(object))
        *number = PyLong_AsDouble(object); /* -1 with an error if it is too large */
    else
        return 0;
    return fabs(*number) <= FLT_MAX && !(*number == -1 && PyErr_Occurred());
}

static int read_list(PyObject *list, int is_real, Piece *piece) {
    Py_ssize_t size = PyList_Size(list);
    if (size > INT32_MAX)
        return 0;
    int32_t *ids = piece->memory = malloc(4 * (size_t)size + 1);
    float *reals = piece->memory;
    piece->data = ids;
    piece->size = (int32_t)size;
    for (Py_ssize_t i = 0; ids && i < size; i++) {
        PyObject *object = PyList_GetItem(list, i);
        int64_t id;
        double real;
        if (is_real ? !read_number(object, &real) : !read_int(object, &id) || id < 0 || id > INT32_MAX)
            return 0;
        if (is_real)
            reals[i] = (float)real;
        else
            ids[i] = (int32_t)id;
    }
    return ids != NULL;
}

static int read_array(PyObject *array, int is_real, Piece *piece) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return 0;
    char format = view.format[0];
    int is_known = format && !view.format[1] && strchr(is_real ? "fd" : "ilq", format);
    int is_plain = is_known && view.ndim == 1 && view.len / view.itemsize <= INT32_MAX
        && (uintptr_t)view.buf % view.itemsize == 0;
    piece->data = view.buf;
    piece->size = is_plain ? (int32_t)(view.len / view.itemsize) : 0;
    piece->is_wide = view.itemsize == 8;
    PyBuffer_Release(&view); /* a numpy array keeps its memory while somebody refers to it */
    if (is_plain)
        piece->owner = Py_NewRef(array);
    return is_plain;
}

static int read_piece(PyObject *values, int is_real, Piece *piece) {
    if ((PyObject *)Py_TYPE(values) == array_type && read_array(values, is_real, piece))
        return 1;
    if (PyList_CheckExact(values) && read_list(values, is_real, piece))
        return 1;
    free_piece(piece);
    PyErr_Clear();
    PyObject *array = PyObject_CallFunctionObjArgs(is_real ? logprobs_of : ids_of, values, NULL);
    int is_plain = array && (PyObject *)Py_TYPE(array) == array_type && read_array(array, is_real, piece);
    Py_XDECREF(array);
    return is_plain;
}

static int read_versions(PyObject **values, TurnRow *row, Py_ssize_t turn, PyObject *spans) {
    int64_t start, end;
    if (!read_int(values[START], &start) || !read_int(values[END], &end))
        return 0;
    if (values[SPANS] != Py_None) {
        PyObject *rows = NULL, *read = PyObject_CallFunction(
            versions_of, "nOOOi", turn, values[SPANS], values[START], values[END], (int)row->size);
        Py_ssize_t reached = PyList_Size(spans);
        long long first, last;
        int is_plain = read && PyArg_ParseTuple(read, "LLO", &first, &last, &rows)
            && PyList_SetSlice(spans, reached, reached, rows) == 0;
        Py_XDECREF(read);
        if (!is_plain)
            return 0;
        start = first, end = last;
    }
    row->version_start = (int32_t)start;
    row->version_end = (int32_t)end;
    return 0 <= start && start <= end && end <= INT32_MAX;
}

static int read_turn(Call *call, PyObject *object, Py_ssize_t before, PyObject *spans) {
    PyObject *values[NUM_OF_TURN] = {NULL};
    int is_plain = (PyObject *)Py_TYPE(object) == turn_type;
    for (int i = 0; is_plain && i < NUM_OF_TURN; i++)
        is_plain = (values[i] = PyObject_GetAttr(object, turn_names[i])) != NULL;
    if (is_plain && call->num_turns == call->room) {
        Turn *larger = realloc(call->turns, (call->room = 2 * call->room + 4) * sizeof(Turn));
        if ((is_plain = larger != NULL))
            call->turns = larger;
    }
    if (is_plain) {
        Turn *turn = memset(&call->turns[call->num_turns], 0, sizeof(Turn));
        TurnRow *row = &turn->row;
        Py_ssize_t index = before + call->num_turns++;
        Py_ssize_t reason = values[REASON] == Py_None ? 0 : PySequence_Index(stop_reasons, values[REASON]);
        is_plain = read_piece(values[PROMPT], 0, &turn->prompt)
            && read_piece(values[COMPLETION], 0, &turn->completion)
            && read_piece(values[LOGPROBS], 1, &turn->logprobs)
            && turn->prompt.size > 0 && turn->completion.size == turn->logprobs.size
            && reason >= 0 && PyBool_Check(values[TRUNCATED]) && read_number(values[REWARD], &row->reward)
            && (values[FIELDS] == Py_None || (PyDict_CheckExact(values[FIELDS]) && !PyDict_Size(values[FIELDS])));
        row->begin = turn->prompt.size;
        row->size = turn->completion.size;
        row->truncated = values[TRUNCATED] == Py_True;
        row->stop_reason = (int8_t)reason;
        is_plain = is_plain && read_versions(values, row, index, spans);
        call->num_bytes += 4 * ((Py_ssize_t)row->begin + row->size);
    }
    for (int i = 0; i < NUM_OF_TURN; i++)
        Py_XDECREF(values[i]);
    return is_plain;
}

static int read_trajectory(Call *call, PyObject *object, Py_ssize_t before, PyObject *stored) {
    PyObject *values[NUM_OF_TRAJECTORY] = {NULL}, *labels = PyTuple_GetItem(stored, LABELS);
    int64_t number;
    double discount;
    int is_plain = (PyObject *)Py_TYPE(object) == trajectory_type;
    for (int i = 0; is_plain && i < NUM_OF_TRAJECTORY; i++)
        is_plain = (values[i] = PyObject_GetAttr(object, trajectory_names[i])) != NULL;
    is_plain = is_plain && PyUnicode_Check(values[ID])
        && (values[GROUP] == Py_None || PyUnicode_Check(values[GROUP]))
        && (values[TASK] == Py_None || read_int(values[TASK], &number))
        && (values[BIRTH] == Py_None || read_int(values[BIRTH], &number))
        && (values[CUT] == Py_None || PyBool_Check(values[CUT]))
        && read_number(values[DISCOUNT], &discount)
        && PyTuple_CheckExact(values[TURNS]) && PyTuple_Size(values[TURNS]) > 0;
    if (is_plain && !PyFloat_CheckExact(values[DISCOUNT])) {
        Py_DECREF(values[DISCOUNT]);
        is_plain = (values[DISCOUNT] = PyFloat_FromDouble(discount)) != NULL;
    }
    for (int i = 0; is_plain && i < TURNS; i++)
        is_plain = PyList_Append(PyTuple_GetItem(labels, i), values[i]) == 0;
    Py_ssize_t size = is_plain ? PyTuple_Size(values[TURNS]) : 0;
    for (Py_ssize_t i = 0; is_plain && i < size; i++)
        is_plain = read_turn(call, PyTuple_GetItem(values[TURNS], i), before, PyTuple_GetItem(stored, OF_SPANS));
    if (is_plain)
        call->turns[call->num_trajectories++].num_turns = (int32_t)size;
    for (int i = 0; i < NUM_OF_TRAJECTORY; i++)
        Py_XDECREF(values[i]);
    return is_plain;
}

static int narrow(Piece *piece) { /* int64 ids to int32 */
    if (!piece->is_wide)
        return 1;
    const int64_t *wide = piece->data;
    int32_t *ids = piece->memory = malloc(4 * (size_t)piece->size + 1);
    int64_t seen = 0;
    for (int32_t i = 0; ids && i < piece->size; i++) {
        ids[i] = (int32_t)wide[i];
        seen |= wide[i];
    }
    piece->data = ids;
    piece->is_wide = 0;
    return ids && seen >= 0 && seen <= INT32_MAX;
}

static Py_ssize_t size_of(const Turn *turn) {
    return (Py_ssize_t)turn->prompt.size + turn->completion.size;
}

static const Turn *tip_of(const Call *call, Py_ssize_t chain) {
    return &call->turns[call->turns[chain].tip];
}

static int repeats(const Turn *turn, const Turn *history) {
    const int32_t *prompt = turn->prompt.data;
    size_t begin = history->prompt.size, size = history->completion.size;
    /* the completion first: most prompts that diverge do so there */
    return memcmp(prompt + begin, history->completion.data, 4 * size) == 0
        && memcmp(prompt, history->prompt.data, 4 * begin) == 0;
}

static int find_chains(Call *call) {
    Py_ssize_t first = 0;
    for (Py_ssize_t j = 0; j < call->num_trajectories; first += call->turns[j++].num_turns) {
        Py_ssize_t first_chain = call->num_chains;
        for (Py_ssize_t i = 0; i < call->turns[j].num_turns; i++) {
            Turn *turn = &call->turns[first + i];
            if (!narrow(&turn->prompt) || !narrow(&turn->completion))
                return 0;
            Py_ssize_t chain = -1, longest = -1;
            for (Py_ssize_t c = call->num_chains - 1; c >= first_chain; c--) {
                const Turn *tip = tip_of(call, c);
                Py_ssize_t size = size_of(tip);
                if (size > longest && size <= turn->prompt.size && repeats(turn, tip))
                    chain = c, longest = size;
            }
            if (chain < 0) {
                chain = call->num_chains++;
                if (chain > first_chain && call->num_breaks < MOST_BREAKS) {
                    int32_t *at = call->breaks[call->num_breaks++];
                    at[0] = (int32_t)j, at[1] = (int32_t)(call->turns[chain - 1].tip - first), at[2] = (int32_t)i;
                }
            }
            call->turns[chain].tip = (int32_t)(first + i);
            turn->row.chain = (int32_t)chain;
            call->num_generated += turn->row.size;
        }
        for (Py_ssize_t c = first_chain; c < call->num_chains; c++)
            call->num_tokens += size_of(tip_of(call, c));
    }
    return 1;
}

static int32_t copy_ids(int32_t *restrict out, const Piece *piece) {
    const int32_t *restrict ids = piece->data;
    int32_t seen = 0;
    for (int32_t i = 0; i < piece->size; i++) {
        out[i] = ids[i];
        seen |= ids[i];
    }
    return seen; /* negative if one is */
}

static int copy_logprobs(int32_t *restrict out, const Piece *piece, int32_t *most) {
    const int32_t *bits = piece->data; /* positive numbers are in the order of their bits */
    const double *restrict wide = piece->data;
    int32_t infinite = 0, largest = *most;
    for (int32_t i = 0; i < piece->size && piece->is_wide; i++) {
        float narrowed = (float)wide[i];
        memcpy(&out[i], &narrowed, 4);
    }
    if (piece->is_wide)
        bits = out;
    for (int32_t i = 0; i < piece->size; i++) {
        int32_t word = bits[i];
        out[i] = word;
        infinite |= (word & 0x7f800000) == 0x7f800000;
        largest = word > largest ? word : largest;
    }
    *most = largest;
    return !infinite;
}

static int copy(Call *call, int32_t *stream, Py_ssize_t used) {
    int32_t *out = stream + used, seen = 0, most = 0;
    int is_plain = 1;
    for (Py_ssize_t c = 0; c < call->num_chains; c++) {
        const Turn *tip = tip_of(call, c);
        seen |= copy_ids(out, &tip->prompt);
        seen |= copy_ids(out + tip->prompt.size, &tip->completion);
        out += size_of(tip);
    }
    for (Py_ssize_t i = 0; i < call->num_turns; i++) {
        Turn *turn = &call->turns[i];
        turn->row.logprob = (int32_t)(out - stream);
        is_plain &= copy_logprobs(out, &turn->logprobs, &most);
        out += turn->logprobs.size;
    }
    memcpy(&call->largest, &most, 4);
    return is_plain && seen >= 0;
}

static int keep(const Call *call, PyObject *stored, int64_t *counts) {
    PyObject *turns = PyTuple_GetItem(stored, OF_TURNS), *chains = PyTuple_GetItem(stored, OF_CHAINS);
    PyObject *trajectories = PyTuple_GetItem(stored, OF_TRAJECTORIES);
    if (PyByteArray_Resize(turns, (counts[NUM_TURNS] + call->num_turns) * sizeof(TurnRow))
        || PyByteArray_Resize(chains, (counts[NUM_CHAINS] + call->num_chains) * sizeof(ChainRow))
        || PyByteArray_Resize(trajectories, (counts[NUM_TRAJECTORIES] + call->num_trajectories) * 4))
        return 0;
    TurnRow *turn_rows = (TurnRow *)PyByteArray_AsString(turns) + counts[NUM_TURNS];
    ChainRow *chain_rows = (ChainRow *)PyByteArray_AsString(chains) + counts[NUM_CHAINS];
    int32_t *turns_of = (int32_t *)PyByteArray_AsString(trajectories) + counts[NUM_TRAJECTORIES];
    for (Py_ssize_t i = 0; i < call->num_turns; i++) {
        turn_rows[i] = call->turns[i].row;
        turn_rows[i].chain += (int32_t)counts[NUM_CHAINS];
    }
    int64_t source = counts[WORDS];
    for (Py_ssize_t c = 0; c < call->num_chains; c++) {
        int32_t size = (int32_t)size_of(tip_of(call, c));
        chain_rows[c] = (ChainRow){(int32_t)source, size};
        source += size;
    }
    for (Py_ssize_t j = 0; j < call->num_trajectories; j++)
        turns_of[j] = call->turns[j].num_turns;
    counts[WORDS] += call->num_tokens + call->num_generated;
    counts[TOKENS] += call->num_tokens;
    counts[GENERATED] += call->num_generated;
    counts[NUM_TURNS] += call->num_turns;
    counts[NUM_CHAINS] += call->num_chains;
    counts[NUM_TRAJECTORIES] += call->num_trajectories;
    counts[NUM_SPANS] = PyList_Size(PyTuple_GetItem(stored, OF_SPANS));
    return 1;
}

/* Find a place in the stream; without the GIL copy what is new to it, and store the turns. */
static int store(Call *call, PyObject *stored, PyObject *staging, int64_t *counts) {
    Py_ssize_t used = counts[WORDS], end = used + call->num_tokens + call->num_generated;
    Py_buffer view;
    PyObject *stream = PyObject_GetAttr(staging, stream_name);
    int is_open = stream && PyObject_GetBuffer(stream, &view, PyBUF_WRITABLE) == 0;
    Py_XDECREF(stream);
    if (is_open && view.len < 4 * end) {
        PyBuffer_Release(&view);
        stream = PyObject_CallMethod(staging, "reserve", "nn", end, used);
        is_open = stream && PyObject_GetBuffer(stream, &view, PyBUF_WRITABLE) == 0;
        Py_XDECREF(stream);
    }
    if (!is_open)
        return 0;
    PyThreadState *state = call->num_bytes < ALONE ? NULL : PyEval_SaveThread();
    int is_plain = view.len >= 4 * end && copy(call, view.buf, used);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&view);
    return is_plain && keep(call, stored, counts);
}

static int read_call(Call *call, PyObject *stored, PyObject *trajectories, const int64_t *counts) {
    Py_ssize_t num_trajectories = PyTuple_Size(trajectories);
    int is_plain = 1;
    for (Py_ssize_t j = 0; is_plain && j < num_trajectories; j++)
        is_plain = read_trajectory(call, PyTuple_GetItem(trajectories, j), counts[NUM_TURNS], stored);
    if (!is_plain || call->num_turns > INT32_MAX)
        return 0;
    PyThreadState *state = call->num_bytes < ALONE ? NULL : PyEval_SaveThread();
    is_plain = find_chains(call);
    if (state)
        PyEval_RestoreThread(state);
    return is_plain && counts[WORDS] + call->num_tokens + call->num_generated <= INT32_MAX;
}

/* Drop labels and spans behind the stored ones: those of a call that ended early. */
static void cut(PyObject *stored, const int64_t *counts) {
    PyObject *labels = PyTuple_GetItem(stored, LABELS), *spans = PyTuple_GetItem(stored, OF_SPANS);
    for (int i = 0; i < TURNS; i++) {
        PyObject *column = PyTuple_GetItem(labels, i);
        if (PyList_Size(column) > counts[NUM_TRAJECTORIES])
            PyList_SetSlice(column, counts[NUM_TRAJECTORIES], PY_SSIZE_T_MAX, NULL);
    }
    if (PyList_Size(spans) > counts[NUM_SPANS])
        PyList_SetSlice(spans, counts[NUM_SPANS], PY_SSIZE_T_MAX, NULL);
}

static PyObject *signs(const Call *call) {
    PyObject *breaks = PyTuple_New(call->num_breaks);
    for (int i = 0; breaks && i < call->num_breaks; i++) {
        const int32_t *at = call->breaks[i];
        PyTuple_SetItem(breaks, i, Py_BuildValue("iii", at[0], at[1], at[2]));
    }
    return breaks ? Py_BuildValue("dN", (double)call->largest, breaks) : NULL;
}

/* take(stored, staging, trajectories, room): None if the call is not plain; the largest
   log-probability, or 0, and the first breaks; or True if there are none. */
static PyObject *take(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer view;
    PyObject *result = NULL, *stored = arguments[0];
    Call call = {0};
    if (count != 4 || PyObject_GetBuffer(PyTuple_GetItem(stored, COUNTS), &view, PyBUF_WRITABLE) < 0)
        return NULL;
    cut(stored, view.buf);
    if (read_call(&call, stored, arguments[2], view.buf)
        && call.num_tokens <= PyLong_AsSsize_t(arguments[3])
        && store(&call, stored, arguments[1], view.buf)) {
        result = call.largest || call.num_breaks ? signs(&call) : Py_NewRef(Py_True);
    } else if (!PyErr_Occurred()
        || (PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError))) {
        PyErr_Clear();
        cut(stored, view.buf);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&view);
    free_call(&call);
    return result;
}

/* bind(Trajectory, Turn, ndarray, ids, logprobs, versions, stop reasons): what `take` refers to. */
static PyObject *bind(PyObject *module, PyObject *bound) {
    PyObject **places[] = {&trajectory_type, &turn_type, &array_type, &ids_of, &logprobs_of, &versions_of, &stop_reasons};
    for (int i = 0; i < 7; i++) {
        PyObject *before = *places[i];
        *places[i] = Py_XNewRef(PyTuple_GetItem(bound, i));
        Py_XDECREF(before);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, NULL}, {"bind", bind, METH_O, NULL}, {NULL}};
static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "take_c", NULL, -1, methods};

PyMODINIT_FUNC PyInit_take_c(void) {
    stream_name = PyUnicode_InternFromString("stream");
    for (int i = 0; i < NUM_OF_TRAJECTORY; i++)
        trajectory_names[i] = PyUnicode_InternFromString(TRAJECTORY_NAMES[i]);
    for (int i = 0; i < NUM_OF_TURN; i++)
        turn_names[i] = PyUnicode_InternFromString(TURN_NAMES[i]);
    return PyModule_Create(&module_def);
}
