// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/without.cuh"

FLASH3_ABLATION_INSTANCE(kE4m3, kSmallTiles, E4m3Traits<Variant::kSmallTiles>, Fp8Producer<Traits>,
                         ConsumerFp8<Traits>)

FLASH3_ABLATION_INSTANCE(kE4m3, kNoPingPong, WithoutPingPong<E4m3Traits<Variant::kNoPingPong>>,
                         Fp8Producer<Traits>, ConsumerFp8<Traits>)

FLASH3_ABLATION_INSTANCE(kE4m3, kNoOverlap, E4m3Traits<Variant::kNoOverlap>, Fp8Producer<Traits>,
                         NoOverlapConsumer<ConsumerFp8<Traits>>)

FLASH3_ABLATION_INSTANCE(kE4m3, kNoLazyMaximum, E4m3Traits<Variant::kNoLazyMaximum>,
                         Fp8Producer<Traits>,
                         cuda::sm90::Consumer<Traits, EagerOperandsFp8<Traits>, StoreFp8<Traits>>)
