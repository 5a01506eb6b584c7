// Images in fp16x2, packed for bulk copies. A first launch measures parts of images, a second one packs them. Read
// conv/fp16x2.cuh first.
#pragma once
#ifndef ROW_BYTES
#define ROW_BYTES 64
#define BLOCK_ROWS 64
#define PACK_BLOCKS 6
#define MAX_PARTS 32
#define MAX_OVERRUN 320
#endif
#include "conv/fp16x2.cuh"

// A packed row: ROW_CHANNELS channels of a position, of one part, 64 bytes whose words are swizzled.
constexpr int ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES, ROW_CHANNELS = ROW_BYTES / 2;
constexpr int PACK_THREADS = BLOCK_ROWS * ROW_CHUNKS; // rows that a block packs at a time, and its threads: one a word
constexpr int LEADING_ROWS = (REACH_BACK + 7) / 8 * 8;     // rows before position 0, so that the first windows are inside
constexpr int TRAILING_ROWS = MAX_OVERRUN + REACH;             // rows behind the last image that a stage may read
constexpr int PART_ELEMENTS = 1 << 13;  // elements of a part of an image, which a block measures; parts, at most
static_assert(PACK_THREADS == MEASURE_THREADS && MAX_PARTS <= WARP, "one block size; a warp joins the parts of an image");

__device__ __forceinline__ int swizzled_chunk(int line, int word) { return word ^ line / 2 % ROW_CHUNKS; }

__device__ __forceinline__ char *align_1024(const void *at) { return (char *)(((uintptr_t)at + 1023) / 1024 * 1024); }

// Parts of an image.
template <class Array>
constexpr int IMAGE_PARTS = ceil_div(Array::SIZE, PART_ELEMENTS) < MAX_PARTS ? ceil_div(Array::SIZE, PART_ELEMENTS) : MAX_PARTS;

// Packed images in scratch. For each part of a number and each chunk of channels the rows of all positions, position 0
// behind `front`; zeros where no image has an element.
struct PackedImages {
    Statistics *known;    // of each image
    RunningStatistics *seen;  // of each part of an image, MAX_PARTS an image
    int *small;      // of each image, how many elements are small
    int batch, count, channel_blocks, front; // count: rows of a part and a chunk, a multiple of BLOCK_ROWS
    char *lines;
    float *squares; // of each row the sum of its scaled elements' squares, where there are two parts

    __device__ PackedImages(char *memory, int batch, int channels, int front)
        : known((Statistics *)memory), seen((RunningStatistics *)(known + batch)), small((int *)(seen + (int64_t)batch * MAX_PARTS)),
          batch(batch), count(ceil_div(batch * IMAGE_PITCH + front + TRAILING_ROWS, BLOCK_ROWS) * BLOCK_ROWS), channel_blocks(ceil_div(channels, ROW_CHANNELS)),
          front(front), lines(align_1024(small + batch)), squares((float *)at(FP16_PARTS, 0, 0)) {}
    __device__ __forceinline__ char *at(int number, int chunk, int line) const {
        return lines + ((int64_t)(number * channel_blocks + chunk) * count + line) * ROW_BYTES;
    }
    __device__ __forceinline__ char *end() const { return (char *)(squares + (int64_t)channel_blocks * count); }

    // Measures all images, by all blocks of a launch.
    template <class Array> __device__ __forceinline__ void measure(const Array &images) const {
        for (int i = blockIdx.x; i < batch * IMAGE_PARTS<Array>; i += gridDim.x) {
            const int image = i / IMAGE_PARTS<Array>, part = i % IMAGE_PARTS<Array>;
            const RunningStatistics found = measured_part<Array>(images.x + (int64_t)image * Array::SIZE, part);
            if (threadIdx.x == 0) {
                seen[(int64_t)image * MAX_PARTS + part] = found;
                if (part == 0) small[image] = 0;
            }
            __syncthreads();
        }
    }

    // Then packs them. From the end, as the second cache has what was measured last.
    template <class Array> __device__ __forceinline__ void lay(const Array &images) const {
        for (int i = count / BLOCK_ROWS * channel_blocks - 1 - blockIdx.x; i >= 0; i -= gridDim.x) {
            lay(images, i);
            __syncthreads();
        }
    }

  private:
    // By a warp: the statistics of an image.
    template <class Array> __device__ __forceinline__ RunningStatistics measured(int image) const {
        const int lane = threadIdx.x % WARP;
        RunningStatistics found;
        if (lane < IMAGE_PARTS<Array>) found = seen[(int64_t)image * MAX_PARTS + lane];
        found.merge_warp();
        return found;
    }

    // BLOCK_ROWS lines of a chunk; what is not held becomes zero.
    template <class Array> __device__ __forceinline__ void lay(const Array &images, int piece) const {
        __shared__ Chunk words[FP16_PARTS][BLOCK_ROWS * ROW_CHUNKS];
        __shared__ float of_words[ROW_CHUNKS][BLOCK_ROWS];
        __shared__ struct {
            float up;
            bool small; // whether it has small elements
        } scales[BLOCK_ROWS]; // of the images that lie there
        const int from = piece / channel_blocks * BLOCK_ROWS, chunk = piece % channel_blocks;
        const int line = threadIdx.x % BLOCK_ROWS, word = threadIdx.x / BLOCK_ROWS, channel = chunk * ROW_CHANNELS + word * CHUNK_ELEMENTS;
        const int position = from + line - front, place = images.at(position);
        float x[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int further = (channel + j) * Array::AREA;
            x[j] = place >= 0 && further < Array::SIZE ? images.x[place + further] : 0;
        }
        const int first = max(from - front, 0) / IMAGE_PITCH, end = min((from + BLOCK_ROWS - 1 - front) / IMAGE_PITCH + 1, batch);
        for (int image = first + threadIdx.x / WARP; image < end; image += PACK_THREADS / WARP) {
            const bool first_tile = chunk == 0 && image * IMAGE_PITCH >= from - front;
            const RunningStatistics seen = measured<Array>(image);
            if (threadIdx.x % WARP > 0) continue;
            const float up = seen.up(MIN_SUBNORMAL);
            scales[image - first] = {up, seen.least * up < MIN_NORMAL};
            if (first_tile) known[image] = seen.known(MIN_SUBNORMAL, Array::SIZE);
        }
        __syncthreads();
        const int image = position / IMAGE_PITCH;
        const float up = place >= 0 ? scales[image - first].up : 0;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = up != 0 ? x[j] : 0; // infinity, too
        if (up != 0 && scales[image - first].small) count_small(image, x, up);
        Chunk halves[FP16_PARTS];
        of_words[word][line] = split_fp16x2(halves, x, up);
        #pragma unroll
        for (int i = 0; i < FP16_PARTS; i++) words[i][line * ROW_CHUNKS + swizzled_chunk(line, word)] = halves[i];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < FP16_PARTS; i++) ((Chunk *)at(i, chunk, from))[threadIdx.x] = words[i][threadIdx.x];
        if (FP16_PARTS == 1 || word > 0) return;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < ROW_CHUNKS; i++) sum += of_words[i][line];
        squares[(int64_t)chunk * count + from + line] = sum;
    }

    __device__ __forceinline__ void count_small(int image, const float (&x)[CHUNK_ELEMENTS], float up) const {
        int count = 0;
        #pragma unroll
        for (float each : x) count += each != 0 && fabsf(each) * up < MIN_NORMAL;
        if (count > 0) atomicAdd(&small[image], count);
    }

    template <class Array> static __device__ __forceinline__ RunningStatistics measured_part(const T *image, int part) {
        constexpr int COUNT = Array::SIZE, WIDE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
        constexpr int64_t VECTORS = COUNT / WIDE;
        constexpr int AT_ONCE = 4; // reads that are under way
        const int end = VECTORS * (part + 1) / IMAGE_PARTS<Array>;
        RunningStatistics seen;
        for (int first = VECTORS * part / IMAGE_PARTS<Array> + threadIdx.x; first < end; first += AT_ONCE * MEASURE_THREADS) {
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
