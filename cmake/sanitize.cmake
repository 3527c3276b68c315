# FLASH3_SANITIZE: AddressSanitizer and UBSan, every report fatal. For host code: the Hopper backend
# is left out, as CUDA's own memory mappings collide with AddressSanitizer's shadow.
if(FLASH3_SANITIZE)
  if(FLASH3_HOPPER STREQUAL "ON")
    message(FATAL_ERROR "FLASH3_SANITIZE=ON and FLASH3_HOPPER=ON: the sanitizers are for host code; "
                        "set FLASH3_HOPPER=OFF")
  endif()
  set(FLASH3_HOPPER OFF)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

# Coverage that libFuzzer steers by. An engine of the caller's own brings its flags along (CXXFLAGS).
if(FLASH3_FUZZ AND NOT FLASH3_FUZZING_ENGINE)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
