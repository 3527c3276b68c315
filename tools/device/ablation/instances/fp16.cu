// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/not_specialised.cuh"
#include "device/ablation/three_stage.cuh"
#include "device/ablation/without.cuh"

FLASH3_ABLATION_INSTANCE(kFloat16, kSmallTiles, Fp16Traits<Variant::kSmallTiles>,
                         TmaProducer<Traits>, Consumer16Bit<Traits>)

FLASH3_ABLATION_INSTANCE(kFloat16, kNoPingPong, WithoutPingPong<Fp16Traits<Variant::kNoPingPong>>,
                         TmaProducer<Traits>, Consumer16Bit<Traits>)

FLASH3_ABLATION_INSTANCE(kFloat16, kNoOverlap, Fp16Traits<Variant::kNoOverlap>, TmaProducer<Traits>,
                         NoOverlapConsumer<Consumer16Bit<Traits>>)

FLASH3_ABLATION_INSTANCE(kFloat16, kNotSpecialised, Fp16Traits<Variant::kNotSpecialised>,
                         NoProducer<Traits>, LoadingConsumer<Traits, Consumer16Bit<Traits>>)

FLASH3_ABLATION_INSTANCE(kFloat16, kThreeStage, Fp16Traits<Variant::kThreeStage>,
                         TmaProducer<Traits>, ThreeStageConsumer<Consumer16Bit<Traits>>)
