# Flags every target shares, and one function that makes a folder of src/ a library with its tests.

add_library(agoq_flags INTERFACE)
target_compile_features(agoq_flags INTERFACE cxx_std_20)
target_include_directories(agoq_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_definitions(agoq_flags INTERFACE AGOQ_VERSION="${PROJECT_VERSION}")
set(host_options
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror=return-type
  # Codes are the same bytes on every backend: no contraction into FMAs, no fast-math.
  -ffp-contract=off -fno-math-errno
  # Changes no result: it says that nobody reads the FP exception flags, without which GCC will not turn
  # a clamp or a choice between two floats into a vector select (e4m3 encodes 4 times as fast with it).
  -fno-trapping-math)
target_compile_options(agoq_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${host_options}>")
target_link_libraries(agoq_flags INTERFACE fmt::fmt OpenMP::OpenMP_CXX Threads::Threads)
if(AGOQ_SANITIZE)
  target_compile_options(agoq_flags INTERFACE -fsanitize=${AGOQ_SANITIZE} -fno-omit-frame-pointer -g
    -fno-sanitize-recover=all)
  target_link_options(agoq_flags INTERFACE -fsanitize=${AGOQ_SANITIZE})
  target_compile_definitions(agoq_flags INTERFACE AGOQ_SANITIZED=1)
endif()

# Half of the time of a clean build went into reading the same headers again: they are precompiled, once
# per set of flags. A file still includes what it uses.
option(AGOQ_PRECOMPILED_HEADERS "Precompile the headers that most files include" ON)
function(agoq_precompile target)
  if(AGOQ_PRECOMPILED_HEADERS)
    target_precompile_headers(${target} PRIVATE <algorithm> <cmath> <cstdint> <fmt/format.h> <functional>
                              <memory> <string> <string_view> <utility> <vector> ${ARGN})
  endif()
endfunction()
# The same for a target whose flags are those of `other`.
function(agoq_precompile_like target other)
  if(AGOQ_PRECOMPILED_HEADERS)
    target_precompile_headers(${target} REUSE_FROM ${other})
  endif()
endfunction()

# Test programs share one precompiled set of headers, GoogleTest's among them.
if(AGOQ_TESTS)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/test_headers.cpp CONTENT "// Carries the precompiled headers.\n")
  add_library(agoq_test_headers OBJECT ${CMAKE_BINARY_DIR}/test_headers.cpp)
  target_link_libraries(agoq_test_headers PUBLIC agoq_flags GTest::gtest)
  target_compile_options(agoq_test_headers PRIVATE -O1)
  agoq_precompile(agoq_test_headers <gtest/gtest.h>)
endif()
# What tests compute themselves is little: they are compiled for a short build.
function(agoq_precompile_test target)
  target_compile_options(${target} PRIVATE -O1)
  agoq_precompile_like(${target} agoq_test_headers)
endfunction()

# agoq_library(<folder> <libraries to the left>...): src/<folder>/*.cpp as the library agoq_<folder>;
# src/<folder>/*_test.cpp as the test program <folder>_test.
function(agoq_library folder)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  if(sources)
    add_library(agoq_${folder} STATIC ${sources})
    target_link_libraries(agoq_${folder} PUBLIC agoq_flags ${ARGN})
    # The CUDA backend and the transports are modules, and the libraries to their left go into them.
    set_target_properties(agoq_${folder} PROPERTIES POSITION_INDEPENDENT_CODE ${AGOQ_HAS_MODULES})
    if(folder STREQUAL core)
      agoq_precompile(agoq_core)
    elseif(folder STREQUAL checkpoint)
      agoq_precompile(agoq_checkpoint <nlohmann/json.hpp>)
    elseif(folder STREQUAL train)
      agoq_precompile_like(agoq_train agoq_checkpoint)
    else()
      agoq_precompile_like(agoq_${folder} agoq_core)
    endif()
  else()
    add_library(agoq_${folder} INTERFACE)
    target_link_libraries(agoq_${folder} INTERFACE agoq_flags ${ARGN})
  endif()
  if(AGOQ_TESTS AND tests)
    add_executable(${folder}_test ${tests})
    target_link_libraries(${folder}_test PRIVATE agoq_${folder} GTest::gtest GTest::gtest_main)
    agoq_precompile_test(${folder}_test)
    target_compile_definitions(${folder}_test PRIVATE AGOQ_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/golden")
    gtest_discover_tests(${folder}_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 600)
  endif()
endfunction()
