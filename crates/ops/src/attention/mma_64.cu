// Attention on tensor cores for heads of up to 64 features.
#include "dev.cuh"
#include "tiles.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "mma_forward.cuh"
#include "mma_backward.cuh"

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_forward_64)(FORWARD_PARAMETERS) {
    forward<64, 64, 2, 64, act>(FORWARD_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_queries_64)(QUERIES_PARAMETERS) {
    backward_queries<64, 64, 2, 32, act>(QUERIES_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_keys_64)(KEYS_PARAMETERS) {
    backward_keys<64, 64, 2, 32, true, act>(KEYS_ARGUMENTS);
}
