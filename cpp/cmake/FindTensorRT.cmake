# TensorRT by TensorRT_ROOT (variable or environment) or the system's paths.
#
#   TensorRT::headers    NvInfer.h and NvOnnxParser.h
#   TensorRT::nvinfer, TensorRT::nvonnxparser    where the libraries are found as well
#   TensorRT_VERSION, TensorRT_LIBRARIES_FOUND
find_path(TensorRT_INCLUDE_DIR NvInfer.h HINTS ${TensorRT_ROOT} ENV TensorRT_ROOT
  PATH_SUFFIXES include x86_64-linux-gnu aarch64-linux-gnu)

if(TensorRT_INCLUDE_DIR)
  # 8 to 10.0 write the number itself, later versions by way of TRT_..._ENTERPRISE.
  file(STRINGS ${TensorRT_INCLUDE_DIR}/NvInferVersion.h version_lines
    REGEX "#define (NV_TENSORRT|TRT)_(MAJOR|MINOR|PATCH)(_ENTERPRISE)? +[0-9]+")
  foreach(part MAJOR MINOR PATCH)
    string(REGEX MATCH "_${part}(_ENTERPRISE)? +([0-9]+)" _ "${version_lines}")
    set(TensorRT_VERSION_${part} ${CMAKE_MATCH_2})
  endforeach()
  set(TensorRT_VERSION
    ${TensorRT_VERSION_MAJOR}.${TensorRT_VERSION_MINOR}.${TensorRT_VERSION_PATCH})
endif()

foreach(library nvinfer nvonnxparser)
  find_library(TensorRT_${library}_LIBRARY
    NAMES ${library} ${library}_${TensorRT_VERSION_MAJOR}
    HINTS ${TensorRT_ROOT} ENV TensorRT_ROOT PATH_SUFFIXES lib lib64)
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TensorRT
  REQUIRED_VARS TensorRT_INCLUDE_DIR VERSION_VAR TensorRT_VERSION)
mark_as_advanced(TensorRT_INCLUDE_DIR TensorRT_nvinfer_LIBRARY TensorRT_nvonnxparser_LIBRARY)

if(TensorRT_FOUND AND NOT TARGET TensorRT::headers)
  add_library(TensorRT::headers INTERFACE IMPORTED)
  set_target_properties(TensorRT::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${TensorRT_INCLUDE_DIR})
  set(TensorRT_LIBRARIES_FOUND TRUE)
  foreach(library nvinfer nvonnxparser)
    if(TensorRT_${library}_LIBRARY)
      add_library(TensorRT::${library} UNKNOWN IMPORTED)
      set_target_properties(TensorRT::${library} PROPERTIES
        IMPORTED_LOCATION ${TensorRT_${library}_LIBRARY})
      target_link_libraries(TensorRT::${library} INTERFACE TensorRT::headers)
    else()
      set(TensorRT_LIBRARIES_FOUND FALSE)
    endif()
  endforeach()
endif()
