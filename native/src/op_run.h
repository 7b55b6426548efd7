// One custom op alone, on host arrays: how tests compare a kernel with its reference.
#pragma once

#include "luce.h"

namespace luce {

void run_op(const char *device, const char *op, luce_array *args, uint32_t n_args, const int32_t *params,
            uint32_t n_params, luce_array *out);

} // namespace luce
