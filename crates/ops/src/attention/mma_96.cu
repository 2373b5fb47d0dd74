// Attention on tensor cores for heads of up to 96 features.
#include "dev.cuh"
#include "tiles.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "mma_forward.cuh"
#include "mma_backward.cuh"

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_forward_96)(FORWARD_PARAMETERS) {
    forward<96, 96, 2, 32, act>(FORWARD_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_queries_96)(QUERIES_PARAMETERS) {
    backward_queries<96, 96, 2, 32, act>(QUERIES_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_keys_96)(KEYS_PARAMETERS) {
    backward_keys<96, 96, 1, 32, true, act>(KEYS_ARGUMENTS);
}
