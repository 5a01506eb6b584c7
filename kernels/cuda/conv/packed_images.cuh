// Images in halves as the copy engine brings them to products, measured and laid out by one launch: images are measured a
// few ahead of where they are laid out, so that they are read twice, but once from memory. Read conv/fp16x2.cuh first.
#pragma once
#include "common/ordered_tickets.cuh"
#include "conv/fp16x2.cuh"

// Lines: a position's OF_LINE channels of one of both numbers, 64 bytes whose words are exchanged.
constexpr int LINE = 64, WORDS = LINE / CHUNK_BYTES, OF_LINE = 32;
constexpr int LAID = 64, LAYING = LAID * WORDS; // lines that a block lays out at a time, and its threads: each a word
constexpr int LAYING_BLOCKS = 6;                // that a multiprocessor must have registers for
constexpr int FRONT = (BEFORE + 7) / 8 * 8;     // lines before position 0, so that windows begin behind the first line
constexpr int BEYOND = 320 + REACH;             // lines behind the last image that a stage may take
constexpr int PART = 1 << 13, MOST_PARTS = 32;  // elements of a part of an image that a block measures at a time, or more
                                                // where there would be more of them
constexpr int AHEAD = 1 << 21;                  // elements that are measured before the first are laid out
static_assert(LAYING == MEASURING && MOST_PARTS <= WARP, "one launch; what parts tell is joined by a warp");

__device__ __forceinline__ int exchanged_word(int line, int word) { return word ^ line / 2 % WORDS; }

__device__ __forceinline__ char *aligned_to_lines(const void *at) { return (char *)(((uintptr_t)at + 1023) / 1024 * 1024); }

// Into how many parts images are cut.
template <class Array>
constexpr int PARTS = parts(Array::SIZE, PART) < MOST_PARTS ? parts(Array::SIZE, PART) : MOST_PARTS;

// A piece of the work of a launch: a part of an image to measure, or LAID lines of a chunk of channels to lay out.
struct Piece {
    bool measured;
    struct Place {
        int operand, at; // of which images, and which
    } place;
};

// What a part of an image tells, in two words that are written whole and are not 0 then: so nobody else has to say that they
// are there.
struct Told {
    uint64_t sizes, sums;

    __device__ __forceinline__ void tell(const Measured &seen) {
        set_flag(&sizes, both(seen.most, seen.least));
        set_flag(&sums, both(-seen.sum, seen.squares)); // at least the sign is not 0
    }
    // Waits for them: sizes alone, or all.
    __device__ __forceinline__ Measured heard(bool all) const {
        const uint64_t first = wait_for_flag(&sizes), second = all ? wait_for_flag(&sums) : 0;
        return {low(first), high(first), all ? -low(second) : 0, high(second)};
    }

  private:
    static __device__ __forceinline__ uint64_t both(float low, float high) {
        return (uint64_t)__float_as_uint(high) << 32 | __float_as_uint(low);
    }
    static __device__ __forceinline__ float low(uint64_t both) { return __uint_as_float((uint32_t)both); }
    static __device__ __forceinline__ float high(uint64_t both) { return __uint_as_float(both >> 32); }
};

// In scratch. For each number and each chunk of channels lie the lines of all positions one after another, position 0
// behind `front`; what no image has is zero.
struct Laid {
    Known *known;
    Told *told; // of the parts of an image, with room for MOST_PARTS
    int *small; // how many elements of an image are
    int *taken; // of pieces of work
    int batch, count, chunks, front; // count: lines of a number and a chunk, a multiple of LAID
    char *lines;
    float *squares; // of a line's scaled elements, their sum, where there are two numbers

    __device__ Laid(char *memory, int batch, int channels, int front)
        : known((Known *)memory), told((Told *)(known + batch)), small((int *)(told + (int64_t)batch * MOST_PARTS)),
          taken(small + batch), batch(batch), count(parts(batch * IMAGE + front + BEYOND, LAID) * LAID),
          chunks(parts(channels, OF_LINE)), front(front), lines(aligned_to_lines(taken + 1)),
          squares((float *)at(NUMBERS, 0, 0)) {}
    __device__ __forceinline__ char *at(int number, int chunk, int line) const {
        return lines + ((int64_t)(number * chunks + chunk) * count + line) * LINE;
    }
    __device__ __forceinline__ char *end() const { return (char *)(squares + (int64_t)chunks * count); }

    // By all threads of the launch before the one that measures.
    __device__ __forceinline__ void begin() const {
        for (int64_t i = grid_index(); i < (int64_t)batch * MOST_PARTS; i += grid_size()) told[i] = {0, 0};
        for (int i = grid_index(); i <= batch; i += grid_size()) *(i < batch ? small + i : taken) = 0;
    }

    // By a block.
    template <class Array> __device__ __forceinline__ void prepare(const Array &images, const Piece &piece) const {
        if (piece.measured)
            measure(images, piece.place.at);
        else
            lay(images, piece.place.at);
    }

  private:
    // A part of an image.
    template <class Array> __device__ __forceinline__ void measure(const Array &images, int piece) const {
        const int image = piece / PARTS<Array>, part = piece % PARTS<Array>;
        const Measured seen = measured_part<Array>(images.x + (int64_t)image * Array::SIZE, part);
        if (threadIdx.x == 0) told[(int64_t)image * MOST_PARTS + part].tell(seen);
    }

    // By a warp: all that parts of an image tell, or their sizes.
    template <class Array> __device__ __forceinline__ Measured heard(int image, bool all) const {
        const int lane = threadIdx.x % WARP;
        Measured seen;
        if (lane < PARTS<Array>) seen = told[(int64_t)image * MOST_PARTS + lane].heard(all);
        seen.join_warp();
        return seen;
    }

    // LAID lines of a chunk; what is not held becomes zero.
    template <class Array> __device__ __forceinline__ void lay(const Array &images, int piece) const {
        __shared__ Chunk words[NUMBERS][LAID * WORDS];
        __shared__ float of_words[WORDS][LAID];
        __shared__ struct {
            float up;
            bool small; // whether it has small elements
        } scales[LAID]; // of the images that lie there
        const int from = piece / chunks * LAID, chunk = piece % chunks;
        const int line = threadIdx.x % LAID, word = threadIdx.x / LAID, channel = chunk * OF_LINE + word * CHUNK_ELEMENTS;
        const int position = from + line - front, place = images.at(position);
        float x[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int further = (channel + j) * Array::AREA;
            x[j] = place >= 0 && further < Array::SIZE ? images.x[place + further] : 0;
        }
        const int first = max(from - front, 0) / IMAGE, end = min((from + LAID - 1 - front) / IMAGE + 1, batch);
        for (int image = first + threadIdx.x / WARP; image < end; image += LAYING / WARP) {
            const bool begins = chunk == 0 && image * IMAGE >= from - front;
            const Measured seen = heard<Array>(image, begins);
            if (threadIdx.x % WARP > 0) continue;
            const float up = seen.up(TINY);
            scales[image - first] = {up, seen.least * up < NORMAL};
            if (begins) known[image] = seen.known(TINY, Array::SIZE);
        }
        __syncthreads();
        const int image = position / IMAGE;
        const float up = place >= 0 ? scales[image - first].up : 0;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = up != 0 ? x[j] : 0; // infinity, too
        if (up != 0 && scales[image - first].small) count_small(image, x, up);
        Chunk halves[NUMBERS];
        of_words[word][line] = halve(halves, x, up);
        #pragma unroll
        for (int i = 0; i < NUMBERS; i++) words[i][line * WORDS + exchanged_word(line, word)] = halves[i];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < NUMBERS; i++) ((Chunk *)at(i, chunk, from))[threadIdx.x] = words[i][threadIdx.x];
        if (NUMBERS == 1 || word > 0) return;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < WORDS; i++) sum += of_words[i][line];
        squares[(int64_t)chunk * count + from + line] = sum;
    }

    __device__ __forceinline__ void count_small(int image, const float (&x)[CHUNK_ELEMENTS], float up) const {
        int count = 0;
        #pragma unroll
        for (float each : x) count += each != 0 && fabsf(each) * up < NORMAL;
        if (count > 0) atomicAdd(&small[image], count);
    }

    template <class Array> static __device__ __forceinline__ Measured measured_part(const T *image, int part) {
        constexpr int COUNT = Array::SIZE, WIDE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
        constexpr int64_t VECTORS = COUNT / WIDE;
        constexpr int AT_ONCE = 4; // reads that are under way
        const int end = VECTORS * (part + 1) / PARTS<Array>;
        Measured seen;
        for (int first = VECTORS * part / PARTS<Array> + threadIdx.x; first < end; first += AT_ONCE * MEASURING) {
            Vector<T, WIDE> vectors[AT_ONCE];
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int at = first + i * MEASURING;
                vectors[i] = at < end ? load<T, WIDE>(image + at * WIDE) : Vector<T, WIDE>{};
            }
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                #pragma unroll
                for (int j = 0; j < WIDE; j++) seen.see(vectors[i].lane[j]);
            }
        }
        seen.join_block();
        return seen;
    }
};

// The order of the pieces of work of OPERANDS arrays of images: `ahead` images are measured; then with each further one about
// as many lines as an image has are laid out, never more, so that they lie in images in front; then what is left.
template <int OPERANDS> struct Order {
    int images, ahead, rounds;
    int parts[OPERANDS], each[OPERANDS], left[OPERANDS]; // to measure of an image; to lay out in a round; and at the end

    __device__ Order(const Laid (&laid)[OPERANDS], const int (&parts_of)[OPERANDS], int elements)
        : images(laid[0].batch), ahead(min(max(::parts(AHEAD, elements), 1 + ::parts(LAID, IMAGE)), images)),
          rounds(images - ahead) {
        for (int i = 0; i < OPERANDS; i++) {
            parts[i] = parts_of[i];
            each[i] = laid[i].chunks * IMAGE / LAID;
            left[i] = laid[i].count / LAID * laid[i].chunks - rounds * each[i];
        }
    }

    // Pieces in front of the first round; and all.
    __device__ __forceinline__ int before() const { return ahead * sum(parts); }
    __device__ __forceinline__ int count() const { return before() + rounds * (sum(parts) + sum(each)) + sum(left); }

    __device__ __forceinline__ Piece operator[](int i) const {
        const int measured = sum(parts), round = measured + sum(each);
        if (i < before()) return {true, found(parts, i / measured, i % measured)};
        i -= before();
        if (i >= rounds * round) return {false, found(left, 0, i - rounds * round, rounds)};
        const int done = i / round, rest = i % round;
        return rest < measured ? Piece{true, found(parts, ahead + done, rest)} : Piece{false, found(each, done, rest - measured)};
    }

  private:
    // The rest-th of what comes of each operand so often, behind what came `done` times before, and `laid` rounds.
    __device__ __forceinline__ Piece::Place found(const int (&counts)[OPERANDS], int done, int rest, int laid = 0) const {
        #pragma unroll
        for (int k = 0; k < OPERANDS - 1; k++) {
            if (rest < counts[k]) return {k, laid * each[k] + done * counts[k] + rest};
            rest -= counts[k];
        }
        constexpr int LAST = OPERANDS - 1;
        return {LAST, laid * each[LAST] + done * counts[LAST] + rest};
    }
    static __device__ __forceinline__ int sum(const int (&counts)[OPERANDS]) {
        int all = 0;
        for (int count : counts) all += count;
        return all;
    }
};
