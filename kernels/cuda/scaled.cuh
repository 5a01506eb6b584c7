// Halves: a float32, scaled by a power of two, as two float16 numbers, high + low / 2^11, three products of which make up
// one of float32. Each image and each filter has a scale of its own, which its largest element takes to 2^14 or up to
// twice that.
//
// An operand is held where all its elements are zero or normal numbers of float16: then each of them keeps at least 22
// bits, and no product is more than 2^-20.4 off, in the root of the mean square 2^-23.8.
#pragma once
#include "group.cuh"
#include "planes.cuh"

constexpr float LOW = 0x1p-11f;     // the unit of low
// Products that a sum must have on average, see Known::share. The mean square of sums must be a LEAST-th of the sum of the
// mean squares of their products.
constexpr float FEW = 8, LEAST = 8;

// What is known of an image, or of a filter.
struct alignas(16) Known {
    float up, down; // its scale, a power of two, and one over that
    float share;    // elements of one size that would count as its own do: of an image as a part of all, of a filter how
                    // many; 0 where it is not held
    float squares;  // of its scaled elements, their sum
};

constexpr int TOP = 14;                     // the largest element is scaled to 2^TOP
constexpr int LEAST_UP = -16, MOST_UP = 89; // exponents of a scale

constexpr int MEASURING = 256;                // threads of a block that measures a filter, or a part of an image
constexpr int PART = 1 << 14, MOST_PARTS = 8; // elements of such a part, or more where there would be more of them

// What a thread, a block, and then all blocks have seen of an operand.
struct alignas(16) Measured {
    float most = 0, least = INFINITY, sum = 0; // of magnitudes the largest, the least that is not 0, the sum
    float squares = 0;                         // their sum, times UNIT^2
    static constexpr float UNIT = 0x1p20f;     // so that squares of what can be held are normal numbers

    __device__ __forceinline__ void see(float x) {
        const float size = fabsf(x), scaled = x * UNIT;
        most = Max::of(most, size);
        least = fminf(least, size > 0 ? size : INFINITY);
        sum += size;
        squares = fma(scaled, scaled, squares);
    }

    __device__ __forceinline__ void join(const Measured &other) {
        most = Max::of(most, other.most);
        least = fminf(least, other.least);
        sum += other.sum;
        squares += other.squares;
    }

    // What all threads of a block have seen, in all of them.
    __device__ __forceinline__ void join_block() {
        __shared__ Vector<float, 4> of_warp[MEASURING / WARP];
        #pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2)
            join({exchanged(most, mask), exchanged(least, mask), exchanged(sum, mask), exchanged(squares, mask)});
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = {most, least, sum, squares};
        __syncthreads();
        *this = Measured();
        for (int i = 0; i < MEASURING / WARP; i++) {
            const Vector<float, 4> &found = of_warp[i];
            join({found.lane[0], found.lane[1], found.lane[2], found.lane[3]});
        }
    }

    // Known::up.
    __device__ __forceinline__ float up() const {
        if (most == 0) return 1;
        const int exponent = TOP + 127 - (int)(__float_as_uint(most) >> 23); // less than LEAST_UP where it is not finite
        if (exponent < LEAST_UP || exponent > MOST_UP) return 0;
        const float up = __int_as_float(exponent + 127 << 23);
        return least * up < 0x1p-14f ? 0 : up;
    }

    // Of an operand of so many elements. Share: (sum |x|)^2 / sum x^2 elements of one size would have these sums.
    __device__ __forceinline__ Known known(float count) const {
        const float up = this->up(), unit = up / UNIT;
        if (most == 0) return {1, 1, INFINITY, 0};
        if (up == 0) return {0, 0, 0, 0};
        return {up, 1 / up, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

// Into how many parts images are cut, each of which a block measures.
template <class Array>
constexpr int PARTS = parts(Array::SIZE, PART) < MOST_PARTS ? parts(Array::SIZE, PART) : MOST_PARTS;

// Such a part of an image, by a block.
template <class Array> __device__ __forceinline__ void measure_part(Measured &result, const T *image, int part) {
    constexpr int COUNT = Array::SIZE, WIDE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
    constexpr int64_t VECTORS = COUNT / WIDE;
    constexpr int AT_ONCE = 4; // reads that are under way
    const int end = VECTORS * (part + 1) / PARTS<Array>;
    Measured seen;
    for (int first = VECTORS * part / PARTS<Array> + threadIdx.x; first < end; first += AT_ONCE * MEASURING) {
        Vector<T, WIDE> found[AT_ONCE];
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * MEASURING;
            found[i] = at < end ? load<T, WIDE>(image + at * WIDE) : Vector<T, WIDE>{};
        }
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            #pragma unroll
            for (int j = 0; j < WIDE; j++) seen.see(found[i].lane[j]);
        }
    }
    seen.join_block();
    if (threadIdx.x == 0) result = seen;
}

// Eight neighbours along the channels, scaled. The sum of their squares.
__device__ __forceinline__ float halve(Word (&words)[2], const float (&x)[GROUP_OF], float up) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < GROUP_OF / 2; i++) {
        const float even = x[2 * i] * up, odd = x[2 * i + 1] * up;
        squares = fma(even, even, fma(odd, odd, squares));
        float of_even, of_odd;
        words[0].lane[i] = rounded_halves(even, odd);
        as_floats(words[0].lane[i], of_even, of_odd);
        words[1].lane[i] = rounded_halves((even - of_even) / LOW, (odd - of_odd) / LOW);
    }
    return squares;
}

// Lines: a position's OF_LINE channels of one of both numbers, 64 bytes whose words are exchanged.
constexpr int LINE = 64, WORDS = LINE / WORD, OF_LINE = 32;
constexpr int LAID = 64, LAYING = LAID * WORDS; // lines that a block lays out, and its threads: each a word
constexpr int FRONT = (BEFORE + 7) / 8 * 8;     // lines before position 0, so that windows begin behind the first line
constexpr int BEYOND = 320 + REACH;             // lines behind the last image that a stage may take
__device__ __forceinline__ int exchanged_word(int line, int word) { return word ^ line / 2 % WORDS; }

__device__ __forceinline__ char *aligned_to_lines(const void *at) { return (char *)(((uintptr_t)at + 1023) / 1024 * 1024); }

// Images in halves as the copy engine brings them, and what is known of each. For each number and each chunk of channels
// lie the lines of all positions one after another, position 0 behind `front`; what no image has is zero.
struct Laid {
    Known *known;
    Measured *measured; // of the parts of an image, with room for MOST_PARTS
    int count, chunks, front; // count: lines of a number and a chunk, a multiple of LAID
    char *lines;
    float *squares; // of a line's scaled elements, their sum

    __device__ Laid(char *memory, int batch, int channels, int front)
        : known((Known *)memory), measured((Measured *)(known + batch)),
          count(parts(batch * IMAGE + front + BEYOND, LAID) * LAID), chunks(parts(channels, OF_LINE)), front(front),
          lines(aligned_to_lines(measured + (int64_t)batch * MOST_PARTS)), squares((float *)at(2, 0, 0)) {}
    __device__ __forceinline__ char *at(int number, int chunk, int line) const {
        return lines + ((int64_t)(number * chunks + chunk) * count + line) * LINE;
    }
    // A part of an image, by a block.
    template <class Array> __device__ __forceinline__ void measure(const Array &images, int64_t image, int part) const {
        measure_part<Array>(measured[image * MOST_PARTS + part], images.x + image * Array::SIZE, part);
    }
    // What every STEP-th part of it tells, in their order.
    template <class Array, int STEP = 1> __device__ __forceinline__ Measured seen(int image, int first = 0) const {
        const Measured *own = measured + (int64_t)image * MOST_PARTS + first;
        Measured all;
        #pragma unroll
        for (int i = 0; i < PARTS<Array>; i += STEP)
            if (PARTS<Array> % STEP == 0 || first + i < PARTS<Array>) all.join(own[i]);
        return all;
    }
    __device__ __forceinline__ char *end() const { return (char *)(squares + (int64_t)chunks * count); }
};

// By a block, LAID lines of a chunk from `from` on, with what is known of the images that begin there; what is not held
// becomes zero. The images are read before what has measured them, the launch before, has ended (wait_for_inputs).
template <class Array> __device__ __forceinline__ void lay(const Array &images, const Laid &laid, int from, int chunk) {
    __shared__ Word words[2][LAID * WORDS];
    __shared__ float squares[WORDS][LAID];
    __shared__ Vector<float, 2> sizes[WORDS][LAID]; // of the line's image, each word some of the parts
    const int line = threadIdx.x % LAID, word = threadIdx.x / LAID, channel = chunk * OF_LINE + word * GROUP_OF;
    const int position = from + line - laid.front, place = images.at(position), image = position / IMAGE;
    float found[GROUP_OF];
    #pragma unroll
    for (int j = 0; j < GROUP_OF; j++) {
        const int further = (channel + j) * Array::AREA;
        found[j] = place >= 0 && further < Array::SIZE ? images.x[place + further] : 0;
    }
    wait_for_inputs();
    const Measured some = place >= 0 ? laid.seen<Array, WORDS>(image, word) : Measured();
    sizes[word][line] = {some.most, some.least};
    __syncthreads();
    Measured all;
    #pragma unroll
    for (int i = 0; i < WORDS; i++) all.join({sizes[i][line].lane[0], sizes[i][line].lane[1], 0, 0});
    const float up = place >= 0 ? all.up() : 0;
    #pragma unroll
    for (int j = 0; j < GROUP_OF; j++) found[j] = up != 0 ? found[j] : 0; // infinity, too
    Word halves[2];
    squares[word][line] = halve(halves, found, up);
    #pragma unroll
    for (int i = 0; i < 2; i++) words[i][line * WORDS + exchanged_word(line, word)] = halves[i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 2; i++) ((Word *)laid.at(i, chunk, from))[threadIdx.x] = words[i][threadIdx.x];
    if (word > 0) return;
    if (chunk == 0 && place >= 0 && position % IMAGE == 0)
        laid.known[image] = laid.seen<Array>(image).known(Array::SIZE);
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < WORDS; i++) sum += squares[i][line];
    laid.squares[(int64_t)chunk * laid.count + from + line] = sum;
}
