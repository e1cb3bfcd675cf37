# The toolchain of a wheel that runs with glibc 2.28 or later. g++ compiles, as everywhere else, so that kernels are the
# same; zig, which knows the symbols of every glibc, links. .ci/wheel/build.py sets the environment:
#   LOWBIT_WHEEL_ARCH  x86_64 or aarch64
#   LOWBIT_WHEEL_ZIG   the program zig
#   LOWBIT_WHEEL_PARTS a folder with include/, lib/ (libraries.sh), glibc_2_28.o and stub/libtorch_cpu.so
set(arch $ENV{LOWBIT_WHEEL_ARCH})
set(parts $ENV{LOWBIT_WHEEL_PARTS})
execute_process(COMMAND uname -m OUTPUT_VARIABLE here OUTPUT_STRIP_TRAILING_WHITESPACE)
if(arch STREQUAL here)
  set(CMAKE_CXX_COMPILER g++)
else()
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR ${arch})
  set(CMAKE_CXX_COMPILER ${arch}-linux-gnu-g++)
  set(CMAKE_CROSSCOMPILING_EMULATOR qemu-${arch}-static -L /usr/${arch}-linux-gnu)
endif()
set(CMAKE_PREFIX_PATH ${parts})

# No name of a folder is left in a wheel: it has the same bytes wherever it is built. csrc and csrc/cuda do the same for
# torch and nvcc.
set(LOWBIT_WHEEL ON)
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
set(CMAKE_CXX_FLAGS_INIT -ffile-prefix-map=${root}/=)
set(CMAKE_C_FLAGS_INIT -ffile-prefix-map=${root}/=)

# g++'s own libraries: that of C++ static and seen by nothing else, since an old system has an old one; what unwinds
# exceptions shared, because those of the operators pass through torch.
foreach(part libstdc++.a libgcc.a libgcc_s.so.1)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${part}
    OUTPUT_VARIABLE file OUTPUT_STRIP_TRAILING_WHITESPACE)
  list(APPEND runtime ${file})
endforeach()
list(JOIN runtime " " runtime)
string(CONCAT link "$ENV{LOWBIT_WHEEL_ZIG} cc -target ${arch}-linux-gnu.2.28 -s -Wl,--no-as-needed "
  "-Wl,--gc-sections -Wl,--allow-shlib-undefined -Wl,-u,__cxa_pure_virtual")
set(module "-shared -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map")
set(last "${parts}/glibc_2_28.o ${runtime} -lpthread -ldl -lm")
set(CMAKE_CXX_LINK_EXECUTABLE "${link} <OBJECTS> -o <TARGET> <LINK_LIBRARIES> ${last}")
set(CMAKE_CXX_CREATE_SHARED_MODULE
    "${link} ${module} -L${parts}/stub <OBJECTS> -o <TARGET> <LINK_LIBRARIES> ${last}")
set(LOWBIT_CUDA_LINK "${link} ${module} <OBJECTS> -o <TARGET> <LINK_LIBRARIES> ${last} -lrt")
