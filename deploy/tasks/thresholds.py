"""Thresholds of the forms of outputs, all in one place, each with its reason.

A form is certain or it is not used: outputs without a form are compared by their values.
"""

# --- boxes: a row of numbers per anchor, cell or query ---
UNIT_TOLERANCE = 1e-3  # rounding of a probability by float16 and resizing
MIN_ANCHORS = 10  # fewer rows are classes of a few steps
MIN_ROWS_PER_COLUMN = 2  # anchors are many more than the numbers of one, unless there are 100
MIN_QUERIES = 100  # queries of a DETR, which may be fewer than its numbers
MAX_EMPTY_SCORE = 0.1  # best probability of a row that detects nothing; half of all rows or more
MIN_EMPTY_SHARE = 0.9  # share of rows that detect nothing; raw scores of these are below 0
MIN_BACKGROUND_SHARE = 0.8  # share of rows that the background wins in front of a Softmax
MIN_CODED_SHARE = 0.99  # share of boxes with ordered corners, or with sizes that are not negative
MIN_CORNER_CORRELATION = 0.3  # corners move together, offsets and sizes do not
MAX_OUTSIDE_PICTURE = 0.1  # distance of a centre to the picture, relative to its side
MIN_INSIDE_SHARE = 0.95  # share of boxes whose centre is nearer than that
MIN_CENTRE_SPREAD = 0.1  # deviation of the centres, relative to the picture: a grid has 0.29
MIN_BINS = 4  # of a distribution of distances; models have 8 or more
MIN_PIXEL_SIDE = 4  # sides of detected boxes in pixels; logits of distances are lower
MAX_POINT_COLUMNS = 64  # numbers of a box with its key points
MIN_POINT_CORRELATION = 0.8  # key points of a box move with its centre
MAX_CELL_OFFSET = 16.0  # YOLOX's raw boxes: cells from the anchor, and the logarithm of a size
MIN_IDLE_SCORE = 0.1  # mean best class above which an objectness suppresses most rows
MIN_QUIET_SCORE = 0.02  # the same of rows that are the first dimension, as YOLO v5's are
DETECTION_SHARE = 1e-3  # share of the surest rows, which show the sizes of boxes
MAX_EMPTY_OBJECTNESS = 0.05  # mean objectness of raw levels
MIN_LIST_ROWS = 3  # rows of a list of boxes, which show its columns
MAX_RELATIVE_EXCESS = 0.05  # of a relative box over the picture, where it is cut at the edge
MAX_QUERIES = 1000  # queries of a DETR: more rows are anchors
