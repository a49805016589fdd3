# The CUDA backend: built where nvcc, cuBLASLt and (for fast attention) cuDNN are found.
#
#   AGOQ_CUDA                 AUTO (where nvcc is found), ON (an error without it) or OFF
#   AGOQ_CUDA_ARCHITECTURES   sm_80, sm_90a and PTX for what comes after; one of them builds faster
set(AGOQ_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set_property(CACHE AGOQ_CUDA PROPERTY STRINGS AUTO ON OFF)
set(AGOQ_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual" CACHE STRING "CUDA architectures, as CMake names them")

set(AGOQ_HAS_CUDA FALSE)
if(AGOQ_SANITIZE)
  # The sanitizers' run-time libraries and device code do not mix; the CUDA backend has compute-sanitizer.
  message(STATUS "AGOQ_SANITIZE is set: without the CUDA backend")
elseif(NOT AGOQ_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.4 QUIET)
  endif()
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND TARGET CUDA::cublasLt)
    set(AGOQ_HAS_CUDA TRUE)
    # The backend is a module (src/backend/CMakeLists.txt) and the libraries to its left go into it.
    set(CMAKE_POSITION_INDEPENDENT_CODE ON)
    message(STATUS "CUDA backend: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, for ${AGOQ_CUDA_ARCHITECTURES}")
  elseif(AGOQ_CUDA STREQUAL "ON")
    message(FATAL_ERROR "AGOQ_CUDA=ON needs nvcc 12.4 or newer and cuBLASLt: install the CUDA toolkit or set AGOQ_CUDA=OFF")
  else()
    message(STATUS "CUDA backend: no, nvcc 12.4 or newer with cuBLASLt was not found")
  endif()
endif()
