// fp16x2: a scaled float32 as two float16 terms, high + low / 2^11. Three products of terms add up to a float32 product.
// Each image and each filter has its own scale, a power of two: its largest scaled element is in [2^14, 2^15). Operands
// that are rounded to at most 10 bits of mantissa need only high, and one product (FP16_TERMS).
//
// Two terms keep at least 22 bits if high is normal; one keeps all bits of a rounded operand. The error of a product of
// such numbers is at most 2^-20.4 of it, 2^-23.8 in root mean square. A filter is representable if all elements are 0 or
// normal. An image may have up to MAX_SMALL subnormal elements; a sum falls back if it is not much larger than their
// possible error.
#pragma once
#include "common/collectives.cuh"
#include "common/mma_sync.cuh"
#include "conv/shifted.cuh"
#include "sm90/tma.cuh"

constexpr int FP16_TERMS = MANTISSA > 10 ? 2 : 1;
constexpr float LOW = 0x1p-11f; // the unit of low terms
// Thresholds of the fallback: the minimum of effective products of a sum (Statistics::share), and the maximum ratio of the
// sum of the products' mean squares to the mean square of the sums. Rounded operands lose no bits, so cancellation is exact.
constexpr float MIN_PRODUCTS = FP16_TERMS == 2 ? 8 : 0x1p-64f, MAX_CANCELLATION = 8;

// Statistics of an image or a filter.
struct alignas(16) Statistics {
    float scale, inverse_scale; // a power of two
    // The participation ratio (sum |x|)^2 / sum x^2: the effective number of non-zeros. For an image, divided by its number
    // of elements. 0 if it is not representable.
    float share;
    float squares; // sum of the squares of the scaled elements
};

constexpr int MAX_EXPONENT = 14; // the largest element is scaled to 2^MAX_EXPONENT
constexpr int MIN_SCALE_EXPONENT = -16, MAX_SCALE_EXPONENT = 89;
constexpr float MIN_NORMAL = 0x1p-14f;    // of float16
constexpr float MIN_SUBNORMAL = 0x1p-24f; // of float16
constexpr int MAX_SMALL = 16;           // maximum of elements of an image between these two
constexpr int NOT_REPRESENTABLE = -1;

// The minimum of a non-zero sum of scaled products, for each small element that it may contain. The error of such an
// element in fp16x2 is 2^-36, and omitting low x low adds as much. Multiplied by the largest scaled number, 2^15, this is
// 2^-20, or 2^-24 of the sum. The error in a single float16 is 2^-25, or 2^-11 of the sum.
constexpr float SMALL_ELEMENT_LOSS = FP16_TERMS == 2 ? 16 : 2;

// Whether a non-zero sum is below `limit`.
template <int COUNT> __device__ __forceinline__ bool any_below(const float (&sums)[COUNT], float limit) {
    bool found = false;
    if (limit > 0) {
        #pragma unroll
        for (float sum : sums) found |= sum != 0 && fabsf(sum) < limit;
    }
    return found;
}

constexpr int MEASURE_THREADS = 256; // of a block that computes statistics of a filter or of a part of an image

// Statistics of the elements that a thread, a warp or a block has read.
struct alignas(16) RunningStatistics {
    float largest = 0, smallest_nonzero = INFINITY, sum = 0; // of magnitudes
    float squares = 0;                     // times UNIT^2
    static constexpr float UNIT = 0x1p20f; // keeps the squares of representable elements normal

    __device__ __forceinline__ void add(float x) {
        const float size = fabsf(x), scaled = x * UNIT;
        largest = Max::of(largest, size);
        smallest_nonzero = fminf(smallest_nonzero, size > 0 ? size : INFINITY);
        sum += size;
        squares = fma(scaled, scaled, squares);
    }

    __device__ __forceinline__ void merge(const RunningStatistics &other) {
        largest = Max::of(largest, other.largest);
        smallest_nonzero = fminf(smallest_nonzero, other.smallest_nonzero);
        sum += other.sum;
        squares += other.squares;
    }

    // Over a warp or a block, in all of its threads.
    __device__ __forceinline__ void merge_warp() {
        #pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2)
            merge({shuffle_xor(largest, mask), shuffle_xor(smallest_nonzero, mask), shuffle_xor(sum, mask),
                shuffle_xor(squares, mask)});
    }
    __device__ __forceinline__ void merge_block() {
        __shared__ Vector<float, 4> of_warp[MEASURE_THREADS / WARP];
        merge_warp();
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = {largest, smallest_nonzero, sum, squares};
        __syncthreads();
        *this = RunningStatistics();
        for (int i = 0; i < MEASURE_THREADS / WARP; i++) {
            const Vector<float, 4> &found = of_warp[i];
            merge({found.lane[0], found.lane[1], found.lane[2], found.lane[3]});
        }
    }

    // The scale of an operand; 0 if it is not representable: a scaled element would be below `smallest`, or it is not finite.
    __device__ __forceinline__ float scale(float smallest) const {
        if (largest == 0) return 1;
        const int exponent = MAX_EXPONENT + 127 - (int)(__float_as_uint(largest) >> 23); // too small where not finite
        if (exponent < MIN_SCALE_EXPONENT || exponent > MAX_SCALE_EXPONENT) return 0;
        const float scale = __int_as_float(exponent + 127 << 23);
        return smallest_nonzero * scale < smallest ? 0 : scale;
    }

    // count: the divisor of `share`.
    __device__ __forceinline__ Statistics statistics(float smallest, float count) const {
        const float scale = this->scale(smallest), unit = scale / UNIT;
        if (largest == 0) return {1, 1, INFINITY, 0};
        if (scale == 0) return {0, 0, 0, 0};
        return {scale, 1 / scale, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

// Scales and splits eight neighbouring channels; returns the sum of the scaled elements' squares.
__device__ __forceinline__ float split_fp16x2(Chunk (&terms)[FP16_TERMS], const float (&x)[CHUNK_ELEMENTS],
    float scale) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS / 2; i++) {
        const float even = rounded(x[2 * i]) * scale, odd = rounded(x[2 * i + 1]) * scale;
        squares = fma(even, even, fma(odd, odd, squares));
        terms[0].lane[i] = pack_pair<FLOAT16>(even, odd);
        if constexpr (FP16_TERMS == 2) {
            float of_even, of_odd;
            unpack_float16(terms[0].lane[i], of_even, of_odd);
            terms[1].lane[i] = pack_pair<FLOAT16>((even - of_even) / LOW, (odd - of_odd) / LOW);
        }
    }
    return squares;
}

// Images in fp16x2, packed for bulk copies. A first launch computes statistics of parts of images, a second one packs the
// images. Read conv/fp16x2.cuh first. Macros: PACKED_MACROS in shifted_fp16x2.py.

// A packed row: one term of ROW_CHANNELS channels of a position, with the 64-byte swizzle.
constexpr int ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES, ROW_CHANNELS = ROW_BYTES / 2;
constexpr int PACK_THREADS = BLOCK_ROWS * ROW_CHUNKS;  // a block packs BLOCK_ROWS rows at a time, one chunk per thread
constexpr int LEADING_ROWS = (REACH_BACK + 7) / 8 * 8; // rows before position 0 that the first windows read
constexpr int TRAILING_ROWS = MAX_OVERRUN + REACH;     // rows after the last image that a stage may read
constexpr int PART_ELEMENTS = 1 << 13;                 // of a part of an image, for which a block computes statistics
static_assert(PACK_THREADS == MEASURE_THREADS && MAX_PARTS <= WARP,
    "one block size; a warp joins the parts of an image");

__device__ __forceinline__ int swizzled_chunk(int row, int chunk) { return chunk ^ row / 2 % ROW_CHUNKS; }

// The number of parts of an image.
template <class Array>
constexpr int IMAGE_PARTS =
    ceil_div(Array::SIZE, PART_ELEMENTS) < MAX_PARTS ? ceil_div(Array::SIZE, PART_ELEMENTS) : MAX_PARTS;

// Packed images in scratch: for each term and each block of channels the rows of all positions, after `leading` rows. The
// padding is 0.
struct PackedImages {
    Statistics *statistics;             // of each image
    RunningStatistics *part_statistics; // of each part of an image, MAX_PARTS an image
    int *small;                         // small elements of each image
    int batch, count, channel_blocks, leading; // count: rows of a term and a block of channels
    char *rows, *end;
    float *squares; // of each row, the sum of its scaled elements' squares; only with two terms

    __device__ PackedImages(char *memory, int batch, int channels, int leading)
        : batch(batch), count(ceil_div(batch * IMAGE_PITCH + leading + TRAILING_ROWS, BLOCK_ROWS) * BLOCK_ROWS),
          channel_blocks(ceil_div(channels, ROW_CHANNELS)), leading(leading) {
        const int64_t all_rows = (int64_t)channel_blocks * count;
        statistics = PACKED_STATISTICS(Statistics, memory, batch, all_rows);
        part_statistics = PACKED_PARTS(RunningStatistics, memory, batch, all_rows);
        small = PACKED_SMALL(int, memory, batch, all_rows), squares = PACKED_SQUARES(float, memory, batch, all_rows);
        rows = *PACKED_ROWS(char[ROW_BYTES], memory, batch, all_rows), end = PACKED_END(char, memory, batch, all_rows);
    }
    __device__ __forceinline__ char *at(int term, int channel_block, int row) const {
        return rows + ((int64_t)(term * channel_blocks + channel_block) * count + row) * ROW_BYTES;
    }

    // Computes the statistics of all parts of all images. By all blocks of a launch.
    template <class Array> __device__ __forceinline__ void measure(const Array &images) const {
        for (int i = blockIdx.x; i < batch * IMAGE_PARTS<Array>; i += gridDim.x) {
            const int image = i / IMAGE_PARTS<Array>, part = i % IMAGE_PARTS<Array>;
            const RunningStatistics found = measured_part<Array>(images.x + (int64_t)image * Array::SIZE, part);
            if (threadIdx.x == 0) {
                part_statistics[(int64_t)image * MAX_PARTS + part] = found;
                if (part == 0) small[image] = 0;
            }
            __syncthreads();
        }
    }

    // Packs them, in the next launch. The end first, because L2 holds what measure() read last.
    template <class Array> __device__ __forceinline__ void pack(const Array &images) const {
        for (int i = count / BLOCK_ROWS * channel_blocks - 1 - blockIdx.x; i >= 0; i -= gridDim.x) {
            pack_rows(images, i);
            __syncthreads();
        }
    }

  private:
    // The statistics of an image. By a warp.
    template <class Array> __device__ __forceinline__ RunningStatistics measured(int image) const {
        const int lane = threadIdx.x % WARP;
        RunningStatistics found;
        if (lane < IMAGE_PARTS<Array>) found = part_statistics[(int64_t)image * MAX_PARTS + lane];
        found.merge_warp();
        return found;
    }

    // Packs BLOCK_ROWS rows of a block of channels. Images that are not representable become 0.
    template <class Array> __device__ __forceinline__ void pack_rows(const Array &images, int item) const {
        __shared__ Chunk packed[FP16_TERMS][BLOCK_ROWS * ROW_CHUNKS];
        __shared__ float squares_of_chunks[ROW_CHUNKS][BLOCK_ROWS];
        __shared__ struct {
            float scale;
            bool small; // whether it has small elements
        } scales[BLOCK_ROWS]; // of the images that these rows are of
        const int from = item / channel_blocks * BLOCK_ROWS, channel_block = item % channel_blocks;
        const int row = threadIdx.x % BLOCK_ROWS, chunk = threadIdx.x / BLOCK_ROWS,
            channel = channel_block * ROW_CHANNELS + chunk * CHUNK_ELEMENTS;
        const int position = from + row - leading, offset = images.at(position);
        float x[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int of_channel = (channel + j) * Array::AREA;
            x[j] = offset >= 0 && of_channel < Array::SIZE ? images.x[offset + of_channel] : 0;
        }
        const int first = max(from - leading, 0) / IMAGE_PITCH,
            end = min((from + BLOCK_ROWS - 1 - leading) / IMAGE_PITCH + 1, batch);
        for (int image = first + threadIdx.x / WARP; image < end; image += PACK_THREADS / WARP) {
            const bool writes = channel_block == 0 && image * IMAGE_PITCH >= from - leading;
            const RunningStatistics seen = measured<Array>(image);
            if (threadIdx.x % WARP > 0) continue;
            const float scale = seen.scale(MIN_SUBNORMAL);
            scales[image - first] = {scale, seen.smallest_nonzero * scale < MIN_NORMAL};
            if (writes) statistics[image] = seen.statistics(MIN_SUBNORMAL, Array::SIZE);
        }
        __syncthreads();
        const int image = position / IMAGE_PITCH;
        const float scale = offset >= 0 ? scales[image - first].scale : 0;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = scale != 0 ? x[j] : 0; // removes infinity
        if (scale != 0 && scales[image - first].small) count_small(image, x, scale);
        Chunk terms[FP16_TERMS];
        squares_of_chunks[chunk][row] = split_fp16x2(terms, x, scale);
        #pragma unroll
        for (int i = 0; i < FP16_TERMS; i++) packed[i][row * ROW_CHUNKS + swizzled_chunk(row, chunk)] = terms[i];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < FP16_TERMS; i++)
            ((Chunk *)at(i, channel_block, from))[threadIdx.x] = packed[i][threadIdx.x];
        if (FP16_TERMS == 1 || chunk > 0) return;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < ROW_CHUNKS; i++) sum += squares_of_chunks[i][row];
        squares[(int64_t)channel_block * count + from + row] = sum;
    }

    __device__ __forceinline__ void count_small(int image, const float (&x)[CHUNK_ELEMENTS], float scale) const {
        int count = 0;
        #pragma unroll
        for (float each : x) count += each != 0 && fabsf(each) * scale < MIN_NORMAL;
        if (count > 0) atomicAdd(&small[image], count);
    }

    template <class Array> static __device__ __forceinline__ RunningStatistics measured_part(const T *image, int part) {
        constexpr int COUNT = Array::SIZE, WIDE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
        constexpr int64_t VECTORS = COUNT / WIDE;
        constexpr int AT_ONCE = 4; // loads in flight
        const int end = VECTORS * (part + 1) / IMAGE_PARTS<Array>;
        RunningStatistics seen;
        const int begin = VECTORS * part / IMAGE_PARTS<Array>;
        for (int first = begin + threadIdx.x; first < end; first += AT_ONCE * MEASURE_THREADS) {
            Vector<T, WIDE> vectors[AT_ONCE];
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int at = first + i * MEASURE_THREADS;
                vectors[i] = at < end ? load<T, WIDE>(image + at * WIDE) : Vector<T, WIDE>{};
            }
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                #pragma unroll
                for (int j = 0; j < WIDE; j++) seen.add(vectors[i].lane[j]);
            }
        }
        seen.merge_block();
        return seen;
    }
};
