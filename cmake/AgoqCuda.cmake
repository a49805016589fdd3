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
    message(STATUS "CUDA backend: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, for ${AGOQ_CUDA_ARCHITECTURES}")
  elseif(AGOQ_CUDA STREQUAL "ON")
    message(FATAL_ERROR "AGOQ_CUDA=ON needs nvcc 12.4 or newer and cuBLASLt: install the CUDA toolkit or set AGOQ_CUDA=OFF")
  else()
    message(STATUS "CUDA backend: no, nvcc 12.4 or newer with cuBLASLt was not found")
  endif()
endif()

# cuDNN's attention needs cudnn.h (https://developer.nvidia.com/cudnn, or the PyPI package nvidia-cudnn-cu13
# with CUDNN_ROOT set to its folder) and the headers of cudnn-frontend, which ./dev fetches. The library is
# opened at run time.
set(AGOQ_CUDNN_FRONTEND_VERSION 1.19.1)
set(AGOQ_HAS_CUDNN FALSE)
if(AGOQ_HAS_CUDA)
  find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDNN_ROOT} $ENV{CUDNN_ROOT} ${CUDAToolkit_INCLUDE_DIRS}
            PATH_SUFFIXES include)
  find_library(CUDNN_LIBRARY NAMES libcudnn.so.9 cudnn HINTS ${CUDNN_ROOT} $ENV{CUDNN_ROOT}
               ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h NO_DEFAULT_PATH
            PATHS ${CMAKE_SOURCE_DIR}/.data/cudnn-frontend-${AGOQ_CUDNN_FRONTEND_VERSION}/include)
  if(CUDNN_INCLUDE_DIR)
    file(STRINGS ${CUDNN_INCLUDE_DIR}/cudnn_version.h cudnn_version REGEX "define CUDNN_M[AJIN]+OR [0-9]+")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" cudnn_version "${cudnn_version}")
  endif()
  if(NOT CUDNN_INCLUDE_DIR)
    message(STATUS "cuDNN: no, cudnn.h was not found; attention will use plain kernels")
  elseif(cudnn_version VERSION_LESS 9.8 OR cudnn_version VERSION_GREATER_EQUAL 10)
    message(STATUS "cuDNN: no, 9.8 or a newer 9.x is needed and ${cudnn_version} was found")
  elseif(NOT CUDNN_FRONTEND_INCLUDE_DIR)
    message(STATUS "cuDNN: no, cudnn-frontend's headers are not there: run ./dev build, which fetches them")
  else()
    set(AGOQ_HAS_CUDNN TRUE)
    message(STATUS "cuDNN: ${cudnn_version}, cudnn-frontend ${AGOQ_CUDNN_FRONTEND_VERSION}")
  endif()
endif()
