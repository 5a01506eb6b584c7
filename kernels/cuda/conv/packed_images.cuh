// Images in fp16x2, packed for bulk copies. A first launch computes statistics of parts of images, a second one packs the
// images. Read conv/fp16x2.cuh first. Macros: PACKED_MACROS in shifted_fp16x2.py.
#pragma once
#include "conv/fp16x2.cuh"

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
