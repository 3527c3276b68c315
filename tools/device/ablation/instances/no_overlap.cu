// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/no_overlap.cuh"

namespace flash3::device {

using Traits = Fp16Traits<Variant::kNoOverlap>;

}

FLASH3_ABLATION_INSTANCE(kFloat16, kNoOverlap, Traits, TmaProducer<Traits>,
                         NoOverlapConsumer<Consumer16Bit<Traits>>)
