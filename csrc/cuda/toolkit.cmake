# Sets with_cuda to OFF where nvcc is too old for the kernels and LOWBIT_CUDA is AUTO; with ON that is an error. Kernels
# take arguments of up to 32,764 bytes, for which nvcc has to be of CUDA 12.1. Its own word is read, since CMake may not
# know the language yet.
set(nvcc ${CMAKE_CUDA_COMPILER})
if(NOT nvcc)
  set(nvcc $ENV{CUDACXX})
endif()
if(NOT nvcc)
  set(nvcc nvcc)
endif()
execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE said ERROR_QUIET)
string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" said "${said}")
if(said AND CMAKE_MATCH_1 VERSION_LESS 12.1)
  if(NOT LOWBIT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "lowbit: ${nvcc} is of CUDA ${CMAKE_MATCH_1}, and the kernels need 12.1: name a newer one by "
                        "CUDACXX, or build without kernels for GPUs by LOWBIT_CUDA=OFF")
  endif()
  message(STATUS "lowbit: no kernels for GPUs: ${nvcc} is of CUDA ${CMAKE_MATCH_1}, and they need 12.1")
  set(with_cuda OFF)
endif()
