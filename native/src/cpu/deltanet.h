// The CPU runs its ops of the gated delta rule here, in parts as attention.h says.
#pragma once

#include "common/kernels.h"

namespace luce {

void cpu_conv(const ConvArgs &args, int ith, int nth);
void cpu_deltanet(const DeltaArgs &args, int ith, int nth);

} // namespace luce
