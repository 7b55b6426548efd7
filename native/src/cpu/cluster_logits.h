// The CPU computes here the logits of some clusters of the vocabulary (kernels.h). Each call does the part of thread ith of
// nth, and none waits for another.
#pragma once

#include "common/kernels.h"

namespace luce {

void cpu_cluster_logits(const ClusterLogitsArgs &args, int ith, int nth);

} // namespace luce
