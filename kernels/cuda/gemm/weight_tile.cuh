// A tile of weights and of their optimizer state in the registers of a warp, for kernels that read, update and write them once.
//
// A tile is 16 units x 16 inputs. Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of units g and g + 8.
#pragma once
#include "common/common.cuh"

// STATES: the number of arrays: the weights and their optimizer state.
template <int STATES> struct WeightTile {
    Vector<float, 4> states[STATES][2]; // [array, the weights first][unit g or g + 8]

    // from: the arrays. index(half): of the lane's first number of unit g (half 0) or g + 8 (half 1).
    template <class Index> __device__ __forceinline__ void load(const float *const (&from)[STATES], const Index &index) {
        #pragma unroll
        for (int s = 0; s < STATES; s++)
            #pragma unroll
            for (int half = 0; half < 2; half++)
                states[s][half] = ::load<float, 4>(from[s] + index(half));
    }
    // Updates the lane's numbers of unit g (half 0) or g + 8 (half 1). update(i, numbers): of number i and its optimizer state.
    template <class Update> __device__ __forceinline__ void update(int half, const Update &update) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float numbers[STATES];
            #pragma unroll
            for (int s = 0; s < STATES; s++) numbers[s] = states[s][half].lane[i];
            update(i, numbers);
            #pragma unroll
            for (int s = 0; s < STATES; s++) states[s][half].lane[i] = numbers[s];
        }
    }
    // Stores the lane's numbers of unit g (half 0) or g + 8 (half 1) from `index` on.
    __device__ __forceinline__ void store(int half, float *const (&to)[STATES], int index) const {
        #pragma unroll
        for (int s = 0; s < STATES; s++) store_four(to[s] + index, states[s][half]);
    }

  private:
    // Stores four numbers by one instruction. The compiler may make four of an assignment.
    static __device__ __forceinline__ void store_four(float *to, const Vector<float, 4> &v) {
#if __CUDA_ARCH__ >= 700
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
            ::"l"(to), "f"(v.lane[0]), "f"(v.lane[1]), "f"(v.lane[2]), "f"(v.lane[3]) : "memory");
#else
        *(Vector<float, 4> *)to = v;
#endif
    }
};
