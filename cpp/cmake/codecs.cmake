# What decodes pictures (CALIB8_CODECS): CALIB8_CODEC_SOURCES and CALIB8_CODEC_LIBRARIES.
if(CALIB8_CODECS STREQUAL "opencv")
  find_package(OpenCV REQUIRED COMPONENTS core imgcodecs)
  set(CALIB8_CODEC_SOURCES src/codec_opencv.cpp)
  set(CALIB8_CODEC_LIBRARIES opencv_core opencv_imgcodecs)
elseif(CALIB8_CODECS STREQUAL "plain")
  find_package(JPEG REQUIRED)  # libjpeg-turbo's: BGR out of the box is its own
  find_package(PNG REQUIRED)
  find_package(WebP REQUIRED)
  set(CALIB8_CODEC_SOURCES
    src/codec_jpeg.cpp src/codec_plain.cpp src/codec_png.cpp src/codec_webp.cpp)
  set(CALIB8_CODEC_LIBRARIES JPEG::JPEG PNG::PNG WebP::webp)
else()
  message(FATAL_ERROR "CALIB8_CODECS must be opencv or plain, got '${CALIB8_CODECS}'")
endif()
