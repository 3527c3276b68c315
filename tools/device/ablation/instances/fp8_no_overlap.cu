// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/no_overlap.cuh"

namespace flash3::device {

using Traits = E4m3Traits<Variant::kNoOverlap>;

}

FLASH3_ABLATION_INSTANCE(kE4m3, kNoOverlap, Traits, Fp8Producer<Traits>,
                         NoOverlapConsumer<ConsumerFp8<Traits>>)
