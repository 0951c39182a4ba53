"""Where two models part, or one model in two runtimes: tensor by tensor, in the order of the graph.

Two models that ONNX Runtime runs are tapped: every tensor that both have becomes an output of
both, and a sample is run once in each. Of a Q/DQ model the values count that its next layers read,
behind the DequantizeLinear (`deploy.metrics.layerwise`).

Two runtimes are compared otherwise. What a runtime fuses depends on who else reads a tensor, so a
tap may hide a wrong fusion, or be the cause of one. Every tensor is therefore computed by a model
that is cut off behind it, and so much of the graph as stands before it is fused as ever::

    whole      x -> Conv -> Relu -> Resize -> Conv -> y
    cuts       x -> Conv -> Relu
               x -> Conv -> Relu -> Resize
               ...

Each costs a load, so only as many are looked at as it takes to find where they part, by halves.
"""
