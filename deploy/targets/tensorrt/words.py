"""Words that the files of this target share: types of what is not int8, and roles of files."""

FP16, BF16, FP32 = "fp16", "bf16", "fp32"
FLOAT, CACHE = "float model for TensorRT", "TensorRT cache"
QDQ, TYPED = "TensorRT Q/DQ model", "TensorRT typed model"
PLAIN = "TensorRT float model without repairs, to compare with"
FLOAT_TYPED = "TensorRT float16 model, to compare with"
