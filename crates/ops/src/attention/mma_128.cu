// Attention on tensor cores for heads of up to 128 features.
#include "dev.cuh"
#include "tiles.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "mma_forward.cuh"
#include "mma_backward.cuh"

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_forward_128)(FORWARD_PARAMETERS) {
    forward<128, 128, 1, 64, act>(FORWARD_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_queries_128)(QUERIES_PARAMETERS) {
    backward_queries<128, 128, 1, 32, act>(QUERIES_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_keys_128)(KEYS_PARAMETERS) {
    backward_keys<128, 128, 1, 32, true, act>(KEYS_ARGUMENTS);
}
