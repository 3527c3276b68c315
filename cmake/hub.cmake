# SPDX-License-Identifier: Apache-2.0
# The Python package as Hugging Face's package `kernels` loads it from a folder or from their hub:
#
#   cmake --install BUILD --component hub --prefix FOLDER      (make hub does all of it)
#
# makes FOLDER/build/VARIANT, a package without a name, and its metadata.json. Libraries and operators have a name
# that no other build has, made of the sources: the dynamic linker takes libraries of one name for one library, and torch
# refuses operators that are there already.
option(FLASH3_HUB "Build the Python package for Hugging Face's hub too" ${FLASH3_CHECK})
if(NOT FLASH3_HUB)
  return()
endif()
if(NOT TARGET flash3_eager)
  set(why "flash3: without the build for Hugging Face's hub, which needs the Python package, built with Python's headers")
  if(FLASH3_CHECK)
    message(STATUS "${why}")
    return()
  endif()
  message(FATAL_ERROR "${why}")
endif()

set(hub_backend cpu)
set(hub_backend_of_variant cpu)
set(hub_backend_json "{\"type\": \"cpu\"}")
if(FLASH3_WITH_HOPPER)
  # `kernels` takes it where torch has the same major version of CUDA, and this minor one or a newer.
  string(REGEX MATCH "^([0-9]+)[.]([0-9]+)" cuda ${CMAKE_CUDA_COMPILER_VERSION})
  set(hub_backend cuda)
  set(hub_backend_of_variant cu${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  set(hub_backend_json "{\"type\": \"cuda\", \"archs\": [\"9.0a\"]}")
endif()
set(hub_variant torch-stable-abi210-${hub_backend_of_variant}-${CMAKE_SYSTEM_PROCESSOR}-linux) # 210: TORCH_TARGET_VERSION

set(hub_sources "")
foreach(folder IN ITEMS include src bindings/torch bindings/python cmake)
  file(GLOB_RECURSE found LIST_DIRECTORIES FALSE RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/${folder}/*)
  list(FILTER found EXCLUDE REGEX "__pycache__")
  list(APPEND hub_sources ${found})
endforeach()
list(SORT hub_sources)
set(hub_sums "")
foreach(file IN LISTS hub_sources)
  file(SHA256 ${PROJECT_SOURCE_DIR}/${file} sum)
  string(APPEND hub_sums "${file} ${sum}\n")
endforeach()
string(SHA256 hub_sums "${hub_sums}")
string(SUBSTRING ${hub_sums} 0 10 hub_sums)
set(hub_name flash3_${hub_backend}_${hub_sums})

set(hub_folder ${PROJECT_BINARY_DIR}/hub)
function(flash3_hub_library target)
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${hub_folder} INSTALL_RPATH "$ORIGIN"
                                             BUILD_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN ON)
  flash3_exports(${target} ${ARGN})
  install(TARGETS ${target} LIBRARY DESTINATION build/${hub_variant} COMPONENT hub EXCLUDE_FROM_ALL)
endfunction()

add_library(flash3_hub SHARED ${flash3_library_objects})
target_link_libraries(flash3_hub PRIVATE $<$<BOOL:${FLASH3_WITH_HOPPER}>:flash3::cudart> flash3_manylinux)
flash3_library(flash3_hub)
set_target_properties(flash3_hub PROPERTIES OUTPUT_NAME ${hub_name})
flash3_hub_library(flash3_hub flash3_*)
target_link_options(flash3_hub PRIVATE LINKER:--no-undefined)

flash3_torch_library(flash3_hub_torch flash3_hub)
target_compile_definitions(flash3_hub_torch PRIVATE FLASH3_TORCH_NAME=${hub_name})
set_target_properties(flash3_hub_torch PROPERTIES OUTPUT_NAME ${hub_name}_torch)
flash3_hub_library(flash3_hub_torch)

flash3_eager_module(flash3_hub_eager flash3_hub)
flash3_hub_library(flash3_hub_eager PyInit__eager)

file(READ bindings/python/flash3/_build.py hub_build)
string(REPLACE "NAME = \"flash3\"" "NAME = \"${hub_name}\"" hub_build "${hub_build}")
file(CONFIGURE OUTPUT ${hub_folder}/_build.py CONTENT "${hub_build}" @ONLY)
file(CONFIGURE OUTPUT ${hub_folder}/metadata.json CONTENT "{
  \"id\": \"${hub_name}\",
  \"name\": \"flash3\",
  \"version\": 1,
  \"kernels-minver\": \"0.17.0\",
  \"license\": \"Apache-2.0\",
  \"python-depends\": [],
  \"backend\": ${hub_backend_json}
}
" @ONLY)
flash3_write_sbom(${hub_folder}/flash3.cdx.json library torch)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/bindings/python/flash3/ DESTINATION build/${hub_variant} COMPONENT hub EXCLUDE_FROM_ALL
        FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE PATTERN "_build.py" EXCLUDE
        PATTERN "jax.py" EXCLUDE PATTERN "_jax.py" EXCLUDE PATTERN "_jax_mask.py" EXCLUDE) # their library is not there
install(FILES ${hub_folder}/_build.py ${hub_folder}/metadata.json DESTINATION build/${hub_variant} COMPONENT hub EXCLUDE_FROM_ALL)
install(FILES LICENSE NOTICE ${hub_folder}/flash3.cdx.json DESTINATION . COMPONENT hub EXCLUDE_FROM_ALL)
