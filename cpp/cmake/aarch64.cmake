# For aarch64 by Debian's cross compiler, with the libraries that scripts/cpp_aarch64 unpacks into
# AARCH64_ROOT (environment; build/aarch64-root unless told), and tests run by qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

if(DEFINED ENV{AARCH64_ROOT})
  set(root $ENV{AARCH64_ROOT})
else()
  get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/../../build/aarch64-root ABSOLUTE)
endif()
set(CMAKE_FIND_ROOT_PATH ${root})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# headers of one architecture (openssl/configuration.h), which a native compiler finds by itself
set(own_headers "-isystem ${root}/usr/include/aarch64-linux-gnu")
set(CMAKE_C_FLAGS_INIT ${own_headers})
set(CMAKE_CXX_FLAGS_INIT ${own_headers})
set(own_libraries ${root}/usr/lib/aarch64-linux-gnu)
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,-rpath-link,${own_libraries}")
set(CMAKE_CROSSCOMPILING_EMULATOR
  qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=${own_libraries})
