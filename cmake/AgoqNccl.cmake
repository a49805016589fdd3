# NCCL, which carries the ranks on GPUs: its transport is built where CUDA and NCCL are found.
#
#   AGOQ_NCCL   AUTO (where NCCL is found), ON (an error without it) or OFF
#   NCCL_ROOT   where nccl.h and libnccl are; else beside nvcc, then the system's (Debian: libnccl-dev; PyPI:
#               nvidia-nccl-cu13)
set(AGOQ_NCCL AUTO CACHE STRING "Build the NCCL transport: AUTO, ON or OFF")
set_property(CACHE AGOQ_NCCL PROPERTY STRINGS AUTO ON OFF)

set(AGOQ_HAS_NCCL FALSE)
set(AGOQ_NCCL_OLDEST 2.18)  # splits groups without blocking
if(AGOQ_HAS_CUDA AND NOT AGOQ_NCCL STREQUAL "OFF")
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} ${CUDAToolkit_INCLUDE_DIRS}
            PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT}
               ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
  if(NCCL_INCLUDE_DIR)
    file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h nccl_version REGEX "define NCCL_(MAJOR|MINOR) [0-9]+")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" nccl_version "${nccl_version}")
  endif()
  if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
    set(nccl_problem "nccl.h and libnccl.so.2 were not found")
  elseif(nccl_version VERSION_LESS AGOQ_NCCL_OLDEST)
    set(nccl_problem "${AGOQ_NCCL_OLDEST} or newer is needed and ${nccl_version} was found")
  else()
    set(AGOQ_HAS_NCCL TRUE)
    message(STATUS "NCCL: ${nccl_version}, ${NCCL_LIBRARY}")
  endif()
elseif(NOT AGOQ_HAS_CUDA)
  set(nccl_problem "the CUDA backend is not built")
endif()
if(NOT AGOQ_HAS_NCCL)
  if(AGOQ_NCCL STREQUAL "ON")
    message(FATAL_ERROR "AGOQ_NCCL=ON, but ${nccl_problem}: install NCCL (Debian: libnccl-dev, PyPI: "
                        "nvidia-nccl-cu13 with NCCL_ROOT set to its folder) or set AGOQ_NCCL=OFF")
  elseif(AGOQ_HAS_CUDA AND NOT AGOQ_NCCL STREQUAL "OFF")
    message(STATUS "NCCL: no, ${nccl_problem}; runs on several GPUs need it")
  endif()
endif()
