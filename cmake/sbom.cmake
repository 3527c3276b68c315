# SPDX-License-Identifier: Apache-2.0
# The bill of materials (CycloneDX 1.6, JSON): what is linked or compiled into what is shipped, in the versions that this
# build found. Whoever finds a library says so with flash3_contains(); install.cmake and python.cmake write the files.
#
# No time and no serial number: the same build gives the same file.

# flash3_contains(PART NAME VERSION LICENSE HOW PURL): PART is library, program, torch, jax or tvm_ffi; LICENSE an SPDX expression, or
# a name with an address after a bar; PURL without the version.
function(flash3_contains part name version license how purl)
  if(version STREQUAL "")
    message(FATAL_ERROR "flash3: the version of ${name} is not known, and the bill of materials needs it")
  endif()
  if(license MATCHES "(.*)[|](.*)")
    set(license "{\"license\": {\"name\": \"${CMAKE_MATCH_1}\", \"url\": \"${CMAKE_MATCH_2}\"}}")
  else()
    set(license "{\"expression\": \"${license}\"}")
  endif()
  get_property(parts GLOBAL PROPERTY flash3_sbom_${part})
  if(NOT parts)
    set(parts "[]")
  endif()
  string(JSON count LENGTH "${parts}")
  string(JSON parts SET "${parts}" ${count} "{\"type\": \"library\", \"bom-ref\": \"${purl}@${version}\",
    \"name\": \"${name}\", \"version\": \"${version}\", \"description\": \"${how}\", \"licenses\": [${license}],
    \"purl\": \"${purl}@${version}\"}")
  set_property(GLOBAL PROPERTY flash3_sbom_${part} "${parts}")
endfunction()

# flash3_header_version(RESULT HEADER MACRO...): "1.0.3" from the macros that hold its parts.
function(flash3_header_version result header)
  set(numbers "")
  foreach(macro IN LISTS ARGN)
    file(STRINGS ${header} line REGEX "^#[ ]*define ${macro}[ ]+[0-9]+" LIMIT_COUNT 1)
    string(REGEX MATCH "[0-9]+$" number "${line}")
    list(APPEND numbers "${number}")
  endforeach()
  string(JOIN . version ${numbers})
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# flash3_write_sbom(FILE PART...)
function(flash3_write_sbom file)
  set(components "[]")
  set(refs "[]")
  set(count 0)
  foreach(part IN LISTS ARGN)
    get_property(parts GLOBAL PROPERTY flash3_sbom_${part})
    if(NOT parts)
      continue()
    endif()
    string(JSON length LENGTH "${parts}")
    math(EXPR last "${length} - 1")
    foreach(i RANGE ${last})
      string(JSON component GET "${parts}" ${i})
      string(JSON ref GET "${component}" bom-ref)
      string(JSON components SET "${components}" ${count} "${component}")
      string(JSON refs SET "${refs}" ${count} "\"${ref}\"")
      math(EXPR count "${count} + 1")
    endforeach()
  endforeach()
  set(self "pkg:generic/flash3@${PROJECT_VERSION}")
  string(JSON sbom SET "{\"bomFormat\": \"CycloneDX\", \"specVersion\": \"1.6\", \"version\": 1}" metadata "{\"component\":
    {\"type\": \"library\", \"bom-ref\": \"${self}\", \"name\": \"flash3\", \"version\": \"${PROJECT_VERSION}\",
     \"description\": \"${PROJECT_DESCRIPTION}\", \"licenses\": [{\"expression\": \"Apache-2.0\"}], \"purl\": \"${self}\"}}")
  string(JSON sbom SET "${sbom}" components "${components}")
  string(JSON sbom SET "${sbom}" dependencies "[{\"ref\": \"${self}\", \"dependsOn\": ${refs}}]")
  file(CONFIGURE OUTPUT ${file} CONTENT "${sbom}\n" @ONLY)
endfunction()
