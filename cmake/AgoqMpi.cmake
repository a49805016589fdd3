# MPI, which starts the ranks of a run and carries those on CPUs: built where Open MPI is found.
#
#   AGOQ_MPI   AUTO (where MPI is found), ON (an error without it) or OFF
set(AGOQ_MPI AUTO CACHE STRING "Build the MPI transport: AUTO, ON or OFF")
set_property(CACHE AGOQ_MPI PROPERTY STRINGS AUTO ON OFF)

set(AGOQ_HAS_MPI FALSE)
if(NOT AGOQ_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)  # MPI's C interface is used
  if(AGOQ_MPI STREQUAL "ON")
    find_package(MPI 3.1 REQUIRED COMPONENTS CXX)
  else()
    find_package(MPI 3.1 QUIET COMPONENTS CXX)
  endif()
  if(MPI_CXX_FOUND)
    set(AGOQ_HAS_MPI TRUE)
    message(STATUS "MPI: ${MPI_CXX_VERSION}, ${MPI_CXX_LIBRARIES}")
  else()
    message(STATUS "MPI: no, Open MPI was not found (Debian: libopenmpi-dev openmpi-bin)")
  endif()
endif()
