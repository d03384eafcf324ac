import sys

import boto3

bucket = sys.argv[1]
store = boto3.client("s3")
store.put_object(Bucket=bucket, Key="a folder/report.txt", Body=b"x" * 200_000)
sys.stdout.write(
    f"{store.head_object(Bucket=bucket, Key='a folder/report.txt')['ContentLength']} bytes stored\n"
)
