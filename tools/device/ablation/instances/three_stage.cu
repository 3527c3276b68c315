// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/three_stage.cuh"

namespace flash3::device {

using Traits = Fp16Traits<Variant::kThreeStage>;

}

FLASH3_ABLATION_INSTANCE(kFloat16, kThreeStage, Traits, TmaProducer<Traits>,
                         ThreeStageConsumer<Consumer16Bit<Traits>>)
